"""The manifest of an installed overlay: the shadowed modules, and the hashes of their originals."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ucm.errors import PIP
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.switches import RUN_UPSTREAM, disabled_groups

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")
MANIFEST = "manifest.json"
#: The seam whose hooks are listed by bare name.
DEFAULT_SEAM = "ucm.integration.vllm.hooks"
#: The distribution with which other projects build their overlays.
TOOLS = "ucm-overlay-tools"
REINSTALL = f"reinstall the overlay wheel: `{PIP} install --force-reinstall --no-deps <wheel>`"


@dataclass(frozen=True)
class ShadowedModule:
    """One module that the overlay replaces at import.

    Attributes:
        name: Its dotted name.
        path: Its path in vLLM, and below ``modules/`` in the overlay.
        group: The unit that can be switched off.
        upstream_sha256: The hash of vLLM's file from which it was made.
        rewritten_sha256: The hash of its own content.
        hooks: The hooks that it calls.
        processes: The processes in which it runs.
        changed: The functions, and classes with new fields, that rules changed, by qualified name; each with the hooks
            that it calls.
        reads_beside: Whether it reads files next to the original, and therefore gets the original's path.
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
        release: The release for which it was made.
        version: The overlay's own version.
        modules: By dotted name.
        needs: For each group, the groups whose rewritten modules its own rely on.
        hooks: ``default``: those that UCM's features use; ``all``: also those for third-party methods.
        left_out: The hooks that this build omits.
        distribution: The distribution that installed it.
        owners: The owners of its rules, in the order of application.
        upstream_package: The package whose modules it shadows.
        title: That package's name in prose.
        seams: The seam modules that its modules call, each with the called functions.
        named: Its name for the command that builds it.
        built_by: What built it: ``nox`` in UCM's repository, or the package `TOOLS`.
        publisher: The name of the last owner in prose.
        url: Where that owner's users find help; empty if the owner does not say.
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
    built_by: str = "nox"
    publisher: str = "UCM"
    url: str = ""

    @cached_property
    def disabled(self) -> dict[str, str]:
        """The groups that are off in this process, each with the reason."""
        return disabled_groups(self.needs)

    def command(self, name: str, arguments: str) -> str:
        """Return the command of those who built it, for a hint."""
        if self.built_by != TOOLS:
            return f"`nox -s {name} -- {arguments}`"
        help_at = f" ({self.url})" if self.url else ""
        rules = f"where {TOOLS} and the rules of {self.publisher} are installed{help_at}"
        return f"`python -m transforms {name} {arguments}`, {rules}"

    def module(self, name: str) -> ShadowedModule:
        """Return the entry of a module.

        Raises:
            OverlayImportError: If the manifest lacks it, so does not match the finder beside it.
        """
        if name not in self.modules:
            raise OverlayImportError(
                f"its manifest does not know {name}, which its finder shadows",
                [str(self.directory / MANIFEST)],
                [REINSTALL, RUN_UPSTREAM],
                name=name,
            )
        return self.modules[name]

    def file(self, module: ShadowedModule) -> Path:
        """Return the path of a module's rewritten source."""
        return self.directory / "modules" / module.path


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of an installed overlay package.

    Raises:
        OverlayImportError: If it is missing, truncated or not what the build wrote.
    """
    path = directory / MANIFEST
    try:
        data = _frozen(json.loads(path.read_text(encoding="utf-8")))
        modules = {module["name"]: _made(ShadowedModule, module) for module in data["modules"]}
        return _made(Manifest, {**data, "directory": directory, "modules": modules, "publisher": data["overlay"]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OverlayImportError(
            "its manifest cannot be read", [f"{path}: {error!r}"], [REINSTALL, RUN_UPSTREAM]
        ) from error


def _frozen(value: Any) -> Any:
    """Return what JSON holds, with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _made(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return an object with those of the values that it has fields for."""
    return kind(**{name: value for name, value in data.items() if name in kind.__annotations__})
