"""The manifest of an installed overlay: the shadowed modules, and the files that they were made from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucm.overlay.errors import TamperedOverlayError
from ucm.overlay.switches import RUN_UPSTREAM

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
#: The seam whose hooks go by their names alone.
DEFAULT_SEAM = "ucm.integration.vllm.hooks"
REINSTALL = "reinstall the overlay wheel: `pip install --force-reinstall --no-deps <wheel>`"


@dataclass(frozen=True)
class ShadowedModule:
    """One module that the overlay replaces at import.

    Attributes:
        name: Its dotted name.
        path: Its path in vLLM, and below ``modules/`` in the overlay.
        group: The unit that can be switched off.
        upstream_sha256: The content of vLLM's file that it was made from.
        rewritten_sha256: Its own content.
        hooks: The hooks that it calls.
        processes: Where it runs.
        changed: The functions, and classes with new fields, that rules changed, by qualified name; each with the hooks
            that it calls.
        reads_beside: Whether it reads files beside the original, and so is given the original's path.
    """

    name: str
    path: str
    group: str
    upstream_sha256: str
    rewritten_sha256: str
    hooks: tuple[str, ...]
    processes: tuple[str, ...]
    changed: dict[str, tuple[str, ...]]
    reads_beside: bool = False


@dataclass(frozen=True)
class Manifest:
    """The manifest of an installed overlay.

    Attributes:
        directory: The installed package's directory.
        release: The release that it was made for.
        version: The overlay's own version.
        modules: By dotted name.
        needs: For each group, the groups whose rewritten modules its own rely on.
        hooks: ``default``: those that UCM's features use; ``all``: also those that are there for methods of others.
        left_out: The hooks that this one was built without.
        distribution: What installed it.
        owners: Whose rules made it, in the order in which they were applied.
        upstream_package: The package whose modules it shadows.
        title: That package's name in prose.
        seams: The modules whose functions its own call, each with those functions.
        named: What `nox -s build-overlay` calls it.
    """

    directory: Path
    release: str
    version: str
    modules: dict[str, ShadowedModule]
    needs: dict[str, tuple[str, ...]]
    hooks: str = "all"
    left_out: tuple[str, ...] = ()
    distribution: str = "ucm-vllm-overlay"
    owners: tuple[str, ...] = ("ucm",)
    upstream_package: str = "vllm"
    title: str = "vLLM"
    seams: dict[str, tuple[str, ...]] = field(default_factory=dict)
    named: str = ""

    def module(self, name: str) -> ShadowedModule:
        """The entry of a module.

        Raises:
            TamperedOverlayError: If the manifest is not that of the finder beside it.
        """
        if name not in self.modules:
            raise TamperedOverlayError(
                f"its manifest does not know {name}, which its finder shadows",
                [str(self.directory / MANIFEST)],
                [REINSTALL, RUN_UPSTREAM],
                name=name,
            )
        return self.modules[name]

    def file(self, module: ShadowedModule) -> Path:
        """Where a module's rewritten source lies."""
        return self.directory / "modules" / module.path


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of an installed overlay package.

    Raises:
        TamperedOverlayError: If it is missing, cut short or not what the build wrote.
    """
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        modules = [
            ShadowedModule(
                m["name"],
                m["path"],
                m["group"],
                m["upstream_sha256"],
                m["rewritten_sha256"],
                tuple(m["hooks"]),
                tuple(m["processes"]),
                {name: tuple(hooks) for name, hooks in m["changed"].items()},
                bool(m.get("reads_beside")),
            )
            for m in data["modules"]
        ]
        called = sorted({hook for module in modules for hook in module.hooks})
        needs = {group: tuple(others) for group, others in data["needs"].items()}
        return Manifest(
            directory,
            data["release"],
            data["version"],
            {m.name: m for m in modules},
            needs,
            data.get("hooks", "all"),  # as an overlay was that does not say
            tuple(data.get("left_out", ())),
            data.get("distribution", "ucm-vllm-overlay"),
            tuple(data.get("owners", ("ucm",))),
            data.get("upstream_package", "vllm"),
            data.get("title", "vLLM"),
            {seam: tuple(hooks) for seam, hooks in data.get("seams", {DEFAULT_SEAM: called}).items()},
            data.get("named", data["release"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TamperedOverlayError(
            "its manifest cannot be read", [f"{path}: {error!r}"], [REINSTALL, RUN_UPSTREAM]
        ) from error
