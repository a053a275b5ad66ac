"""The manifest inside an installed overlay: what it shadows, made from what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.overlay.errors import TamperedOverlayError
from ucm.overlay.switches import RUN_UPSTREAM

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
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
    """

    name: str
    path: str
    group: str
    upstream_sha256: str
    rewritten_sha256: str
    hooks: tuple[str, ...]
    processes: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What an installed overlay says of itself.

    Attributes:
        directory: The installed package's directory.
        release: The vLLM release that it was made for.
        version: The overlay's own version.
        modules: By dotted name.
        needs: For each group, the groups whose rewritten modules its own rely on.
    """

    directory: Path
    release: str
    version: str
    modules: dict[str, ShadowedModule]
    needs: dict[str, tuple[str, ...]]

    def module(self, name: str) -> ShadowedModule:
        """What is known of a module.

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
            )
            for m in data["modules"]
        ]
        needs = {group: tuple(others) for group, others in data["needs"].items()}
        return Manifest(directory, data["release"], data["version"], {m.name: m for m in modules}, needs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TamperedOverlayError(
            "its manifest cannot be read", [f"{path}: {error!r}"], [REINSTALL, RUN_UPSTREAM]
        ) from error
