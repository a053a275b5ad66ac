"""Access to the projects in `examples/`, imported like any third-party project.

The examples that change vLLM keep reviewed overlays as every owner does, in directories of their own.
`python -m tests.examples` regenerates them, with those of this repository.
"""

from __future__ import annotations

import runpy
import sys
from typing import TYPE_CHECKING

from tests.releases import reviewed
from transforms.pipeline import cli
from transforms.pipeline.generate import overlay_files, write_changed
from transforms.pipeline.product import compose
from transforms.place import ROOT
from transforms.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.engine.registry import Registry
    from transforms.pipeline.product import Product

EXAMPLES = ROOT / "examples"


def registry_of(project: str) -> Registry:
    """Return the registry of an example that changes a package."""
    found: Registry = runpy.run_path(str(EXAMPLES / project / project / "rules.py"))["REGISTRY"]
    return found


def reviewed_examples() -> list[tuple[Product, tuple[str, ...]]]:
    """Return the products of the examples, alone and behind UCM's rules, each with its reviewed releases."""
    vllm = reviewed("vllm")
    early, npu = registry_of("early_kv"), registry_of("ascend_patches")
    return [
        (compose(early), vllm[vllm.index("0.14.1") :]),
        (compose(REGISTRY, early), ("0.27.1", "0.32.0")),
        (compose(npu), ("0.23.0", "0.24.0", "0.30.0")),
        (compose(REGISTRY, npu), ("0.23.0",)),
    ]


def main(arguments: Sequence[str]) -> int:
    """Regenerate the overlays of this repository and of its examples; return 1 if a file was out of date.

    Args:
        arguments: Those of ``python -m transforms regenerate``, which do not limit the examples.
    """
    code = cli.main(["regenerate", *arguments])
    changed = write_changed(
        {
            path: text
            for product, releases in reviewed_examples()
            for release in releases
            for path, text in overlay_files(release, product).items()
        }
    )
    for path in changed:
        print(path)
    return 1 if changed else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
