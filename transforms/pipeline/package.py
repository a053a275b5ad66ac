"""Build the source package and the wheel of an overlay.

The package is rendered from the templates beside this file. It contains everything that the wheel ships, so anybody can
review it and rebuild the wheel. Builds are reproducible: nothing depends on the machine, the directory or the time.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.wheel import WheelBuilder
from packaging.version import Version

from transforms.engine.errors import OverlayError
from transforms.engine.transform import DEFAULT_SEAM
from transforms.pipeline.checks import changed_definitions, hook_uses
from transforms.pipeline.conflicts import shared_groups
from transforms.pipeline.lock import built_lock
from transforms.pipeline.pages import templates
from transforms.pipeline.product import OWN, UCM
from transforms.pipeline.sbom import make_sbom
from transforms.place import BUILD, BUILT_BY, ROOT, command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from transforms.engine.transform import Seam
    from transforms.pipeline.lock import Lock
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay

RUNTIME = "ucm-runtime"
#: The wheel of this package itself.
TOOLS = "ucm-overlay-tools"
#: The variable in which hatchling looks for the time.
EPOCH = "SOURCE_DATE_EPOCH"
#: The modification time of every file in a wheel, in seconds since 1970; zip cannot represent times before 1980.
DATE = "1580601600"
#: The rendered files and their templates. The start-up files are .pth for every Python and .start (PEP
#: 829) for those that prefer it; their stem must be the same.
RENDERED = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "NOTICE": "NOTICE",
    "{module}/__init__.py": "package/__init__.py",
    "{module}/_boot.py": "package/_boot.py",
    "{module}/_plugin.py": "package/_plugin.py",
    "{module}.pth": "overlay.pth",
    "{module}.start": "overlay.start",
}


class PackageError(OverlayError):
    """A wheel could not be built."""


@dataclass(frozen=True)
class Built:
    """The result of building one overlay.

    Attributes:
        wheel: The overlay's wheel.
        source: The source package that it was built from.
    """

    wheel: Path
    source: Path


def overlay_version(release: str, serial: int, *, all_hooks: bool = False, product: Product = UCM) -> str:
    """Return the overlay's version: the release's, with the serial as its post-release number.

    An overlay with all hooks has a local version, 0.32.0.post2+all.hooks: users build it themselves.
    An overlay with the hooks of other owners names them: 0.32.0.post2+with.ucm.

    Indexes accept no local versions, so the serial cannot follow a plus. A vLLM post-release counts in
    hundreds: 0.8.5.post1 with serial 2 is 0.8.5.post102. So does a development release, which can have no
    post-release: 0.33.0.dev7 with serial 2 is 0.33.0.dev702.
    """
    version = Version(release)
    before = "".join(str(part) for part in version.pre or ())
    post = (version.post or 0) * 100 + (serial if version.dev is None else 0)
    development = f".dev{version.dev * 100 + serial}" if version.dev is not None else ""
    beside = ".".join(("with", *product.others)) if product.others else None
    parts = [part for part in (version.local, beside, "all.hooks" if all_hooks else None) if part]
    local = f"+{'.'.join(parts)}" if parts else ""
    return f"{version.base_version}{before}{f'.post{post}' if post else ''}{development}{local}"


def folder_name(product: Product, release: str, *, all_hooks: bool = False) -> str:
    """Return the name of the folders of an overlay: ``packages/NAME`` for its source, ``wheels/NAME`` for its wheel."""
    own = f"{product.package.project}-{release}"
    # Other owners' overlays of vLLM need a name of their own; the owner `ascend` is in its project's name already.
    parts = [own] if product.publisher in OWN and not product.others else [*product.owners, own]
    return "-".join([*parts, *(["all-hooks"] if all_hooks else [])])


def build_package(
    overlay: Overlay, lock: Lock, out: Path = BUILD, *, all_hooks: bool = False, folder: str = ""
) -> Built:
    """Render an overlay's source package and build its wheel.

    Args:
        overlay: The overlay, already compared with its lock.
        lock: Its reviewed lock.
        out: The output directory: ``packages/`` for the source, ``wheels/`` for the wheel; both have one folder per
            overlay.
        all_hooks: Whether the wheel also contains the opt-in rules.
        folder: The folder below ``wheels/``; default: the overlay's own. Wheels that are installed together share one.

    Raises:
        PackageError: If hatchling fails.
    """
    name = folder_name(overlay.product, overlay.release, all_hooks=all_hooks)
    source = render(overlay, lock, out / "packages" / name, all_hooks=all_hooks)
    return Built(build_wheel(source, out / "wheels" / (folder or name)), source)


def build_runtime(folder: Path) -> Path:
    """Build the wheel of the runtime that every overlay calls.

    Raises:
        PackageError: If hatchling fails.
    """
    return build_wheel(ROOT, folder)


def build_tools(folder: Path) -> Path:
    """Build the wheel of this package, with which other projects build overlays; only a checkout can.

    Raises:
        PackageError: If hatchling fails.
    """
    return build_wheel(ROOT / "transforms", folder)


def render(overlay: Overlay, lock: Lock, target: Path, *, all_hooks: bool = False) -> Path:
    """Write the source package of an overlay; replace an existing one."""
    lock = built_lock(lock, all_hooks=all_hooks)
    sources = {m.path: m.rewritten if all_hooks else m.default for m in overlay.modules}
    files = {path: source for path, source in sources.items() if source is not None}
    if target.exists():
        shutil.rmtree(target)
    environment = templates(trim_blocks=False)
    seams, package = [one.seam for one in overlay.product.registries], overlay.product.module
    left_out = sorted(
        _hooks((m.rewritten for m in overlay.modules), DEFAULT_SEAM) - _hooks(files.values(), DEFAULT_SEAM)
    )
    called = {seam.module: sorted(_hooks(files.values(), seam)) for seam in seams}
    context = _context(overlay, lock, left_out, all_hooks=all_hooks)
    for name, template in RENDERED.items():
        text = environment.get_template(f"{template}.j2").render(context)
        _write(target / name.format(module=package), text.encode())
    for path, source in files.items():
        _write(target / package / "modules" / path, source)
    _write(target / package / "manifest.json", _json(_manifest(overlay, lock, files, {**context, "seams": called})))
    sbom = make_sbom(lock, context["version"], context["hooks"], overlay.product)
    _write(target / "sbom.cdx.json", _json(sbom))
    shutil.copyfile(ROOT / "LICENSE", target / "LICENSE")
    return target


def build_wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a source package with hatchling; it replaces other versions of the same distribution.

    Raises:
        PackageError: If hatchling fails; the message has its output.
    """
    out.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(EPOCH)
    os.environ[EPOCH] = DATE
    try:
        wheel = Path(next(WheelBuilder(str(source)).build(directory=str(out.resolve()), versions=["standard"])))
    except Exception as error:
        raise PackageError(
            "hatchling could not build the wheel",
            where=f"{source}: {error}",
            fix="correct the project's pyproject.toml and what it names",
        ) from error
    finally:
        del os.environ[EPOCH]
        if before is not None:
            os.environ[EPOCH] = before
    for other in set(out.resolve().glob(f"{wheel.name.partition('-')[0]}-*.whl")) - {wheel}:
        other.unlink()  # pip installs a whole folder, and takes one version of a distribution
    return wheel


def runtime_version() -> str:
    """Return the version of the runtime in this checkout."""
    for line in (ROOT / "ucm" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip('"')
    raise PackageError("the runtime states no version", where="ucm/__init__.py", fix="set __version__ there")


def _context(overlay: Overlay, lock: Lock, left_out: list[str], *, all_hooks: bool) -> dict[str, Any]:
    product = overlay.product
    return {
        "distribution": product.publisher.distribution,
        "package": product.module,
        "overlay": product.publisher.title,
        "owner": product.publisher.owner,
        "owners": list(product.owners),
        "upstream_package": product.package.name,
        "project": product.package.project,
        "title": product.package.title,
        "authors": product.package.authors,
        "named": overlay.named,
        "built_by": BUILT_BY,
        "url": product.publisher.url,
        "build": command("nox -s build-overlay"),
        "conflicts": lock.get("conflicts", []),
        "version": overlay_version(overlay.release, lock["serial"], all_hooks=all_hooks, product=product),
        "hooks": "all" if all_hooks else "default",
        "left_out": left_out,
        "release": overlay.release,
        "runtime": RUNTIME,
        "runtime_version": runtime_version(),
        "requires": [one for registry in product.registries for one in registry.requires],
        "pth_name": f"{product.module}.pth",
        "start_name": f"{product.module}.start",
        "modules": lock["modules"],
        "upstream": lock["upstream"],
    }


def _manifest(overlay: Overlay, lock: Lock, files: dict[str, bytes], context: dict[str, Any]) -> dict[str, Any]:
    seams = [one.seam for one in overlay.product.registries]
    locked = {module["path"]: module for module in lock["modules"]}
    modules = [
        {
            **{key: locked[m.path][key] for key in ("name", "path", "group", "upstream_sha256", "rewritten_sha256")},
            "hooks": sorted(_hooks([files[m.path]], DEFAULT_SEAM)),
            "processes": list(dict.fromkeys(p.value for t in m.transforms for p in t.governance.processes)),
            "changed": changed_definitions(files[m.path], seams),
            **({"reads_beside": True} if any(t.module.reads_beside for t in m.transforms) else {}),
        }
        for m in overlay.modules
        if m.path in files
    ]
    needs = group_needs(
        overlay.product, {t.module.group for m in overlay.modules if m.path in files for t in m.transforms}
    )
    shared = shared_groups(overlay)
    needs = {group: sorted({*others, *shared.get(group, ())}) for group, others in needs.items()}
    keys = ("distribution", "package", "owners", "upstream_package", "title", "release", "version", "hooks", "left_out")
    told = {key: context[key] for key in (*keys, "seams", "named", "built_by", "overlay", "url")}
    return {**told, "modules": modules, "needs": needs}


def _hooks(sources: Iterable[bytes], seam: Seam) -> set[str]:
    """Return the hooks of a seam that rewritten modules call."""
    return {use.hook for source in sources for use in hook_uses(source, (seam,)) if use.call is not None}


def group_needs(product: Product = UCM, groups: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return the groups that each group's rewritten modules rely on; for all groups, or some."""
    needs: dict[str, set[str]] = {}
    for transform in product.transforms:
        needs.setdefault(transform.module.group, set()).update(transform.needs)
    return {group: sorted(others - {group}) for group, others in needs.items() if groups is None or group in groups}


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
