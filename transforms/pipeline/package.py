"""From an overlay to its source package and its wheel.

The package is rendered from the templates beside this file and holds everything that is shipped, so that it can be
read, and rebuilt without us. Equal overlays give equal bytes: nothing in it depends on the machine, the directory or
the time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from packaging.version import Version

from transforms.engine.errors import OverlayError
from transforms.pipeline.checks import hook_uses
from transforms.pipeline.sbom import make_sbom
from transforms.registry import TRANSFORMS

if TYPE_CHECKING:
    from transforms.pipeline.lock import Lock
    from transforms.pipeline.rewrite import Overlay

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
TEMPLATES = Path(__file__).parent / "templates"
DISTRIBUTION = "ucm-vllm-overlay"
PACKAGE = "ucm_vllm_overlay"
RUNTIME = "ucm-runtime"
#: The time of every file in a wheel, in seconds since 1970: zip knows none before 1980.
DATE = "1580601600"
#: The files that are rendered from a template of the same name.
RENDERED = (
    "pyproject.toml",
    "README.md",
    "NOTICE",
    f"{PACKAGE}/__init__.py",
    f"{PACKAGE}/_boot.py",
    f"{PACKAGE}/_plugin.py",
)
#: The start-up files: .pth for every Python, .start (PEP 829) for those that prefer it; the stem must be the same.
START_UP = {f"{PACKAGE}.pth": "overlay.pth", f"{PACKAGE}.start": "overlay.start"}


class PackageError(OverlayError):
    """A wheel could not be built."""


@dataclass(frozen=True)
class Built:
    """What the build of one overlay leaves.

    Attributes:
        wheel: The overlay's wheel.
        source: The source package that it was built from.
    """

    wheel: Path
    source: Path


def overlay_version(release: str, serial: int) -> str:
    """The overlay's version: the release's, with our serial as its post-release number.

    An index accepts no local versions, so the serial cannot stand behind a plus. A vLLM post-release counts in
    hundreds: 0.8.5.post1 with serial 2 is 0.8.5.post102. So does a development release, which can have no
    post-release: 0.33.0.dev7 with serial 2 is 0.33.0.dev702.
    """
    version = Version(release)
    before = "".join(str(part) for part in version.pre or ())
    post = (version.post or 0) * 100 + (serial if version.dev is None else 0)
    development = f".dev{version.dev * 100 + serial}" if version.dev is not None else ""
    local = f"+{version.local}" if version.local else ""
    return f"{version.base_version}{before}{f'.post{post}' if post else ''}{development}{local}"


def build_package(overlay: Overlay, lock: Lock, out: Path = BUILD) -> Built:
    """Render an overlay's source package and build its wheel.

    Args:
        overlay: The overlay, already compared with its lock.
        lock: Its reviewed lock.
        out: Below it, ``packages/`` gets the source and ``wheels/`` the wheel.

    Raises:
        PackageError: If hatchling fails.
    """
    source = render(overlay, lock, out / "packages" / f"vllm-{overlay.release}")
    return Built(build_wheel(source, out / "wheels"), source)


def build_runtime(out: Path = BUILD) -> Path:
    """Build the wheel of the runtime that every overlay calls.

    Raises:
        PackageError: If hatchling fails.
    """
    return build_wheel(ROOT, out / "wheels")


def render(overlay: Overlay, lock: Lock, target: Path) -> Path:
    """Write the source package of an overlay; whatever was there before is replaced."""
    if target.exists():
        shutil.rmtree(target)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Python and TOML, not HTML; every value is ours or a version
    )
    context = _context(overlay, lock)
    for name, template in {**{name: name for name in RENDERED}, **START_UP}.items():
        _write(target / name, environment.get_template(f"{template}.j2").render(context).encode())
    for module in overlay.modules:
        _write(target / PACKAGE / "modules" / module.path, module.rewritten)
    _write(target / PACKAGE / "manifest.json", _json(_manifest(overlay, lock, context["version"])))
    _write(target / "sbom.cdx.json", _json(make_sbom(lock, context["version"])))
    shutil.copyfile(ROOT / "LICENSE", target / "LICENSE")
    return target


def build_wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a source package with hatchling.

    Raises:
        PackageError: If hatchling fails; its own words are in the message.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out.resolve())]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": DATE}
    done = subprocess.run(  # noqa: S603 - fixed words
        command, cwd=source, capture_output=True, text=True, check=False, env=environ
    )
    if done.returncode:
        raise PackageError(
            "hatchling could not build the wheel",
            where=f"{source}: {done.stderr.strip()[-800:]}",
            fix="install the build requirements: `pip install hatchling`; `nox -s build-overlay` does it by itself",
        )
    return out / Path(done.stderr.strip().splitlines()[-1]).name


def runtime_version() -> str:
    """The version of the runtime in this checkout."""
    for line in (ROOT / "ucm" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip('"')
    raise PackageError("the runtime states no version", where="ucm/__init__.py", fix="set __version__ there")


def _context(overlay: Overlay, lock: Lock) -> dict[str, Any]:
    runtime = runtime_version()
    return {
        "distribution": DISTRIBUTION,
        "version": overlay_version(overlay.release, lock["serial"]),
        "release": overlay.release,
        "runtime": RUNTIME,
        "runtime_requirement": f"{RUNTIME}>={runtime}",
        "pth_name": f"{PACKAGE}.pth",
        "start_name": f"{PACKAGE}.start",
        "modules": lock["modules"],
        "upstream": lock["upstream"],
    }


def _manifest(overlay: Overlay, lock: Lock, version: str) -> dict[str, Any]:
    transforms = {transform.id: transform for transform in TRANSFORMS}
    locked = {module["path"]: module for module in lock["modules"]}
    modules = [
        {
            **{key: locked[m.path][key] for key in ("name", "path", "group", "upstream_sha256", "rewritten_sha256")},
            "hooks": sorted({use.hook for use in hook_uses(m.rewritten) if use.call is not None}),
            "processes": [process.value for process in transforms[m.transform].governance.processes],
        }
        for m in overlay.modules
    ]
    return {"release": overlay.release, "version": version, "modules": modules, "needs": group_needs()}


def group_needs() -> dict[str, list[str]]:
    """For each group, the groups that its rewritten modules rely on."""
    needs: dict[str, set[str]] = {}
    for transform in TRANSFORMS:
        needs.setdefault(transform.module.group, set()).update(transform.needs)
    return {group: sorted(others - {group}) for group, others in needs.items()}


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
