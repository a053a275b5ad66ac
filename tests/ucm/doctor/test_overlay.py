"""The doctor's findings about the overlay's location, files and import hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ucm.doctor.site import MODULES, RELEASE, Site, write_overlay, write_vllm

if TYPE_CHECKING:
    from pathlib import Path

HOOK = """
import sys

class Stranger:
    def find_spec(self, name, path=None, target=None):
        return None

sys.meta_path.insert(0, Stranger())
"""


def shadow(site: Site) -> Path:
    return site.packages / "ucm_vllm_overlay" / "modules" / MODULES[0][0]


def test_the_runtime_without_an_overlay(bare: Site) -> None:
    write_vllm(bare.packages)
    answer = bare.ask()
    assert (answer.code, answer.statuses(), answer.data["next"]) == (0, {}, [])
    assert (
        answer.data["verdict"] == "No UCM overlay is installed. Sparse attention needs one, the prefix cache does not."
    )
    found = answer.finding("overlay")
    assert found["what"].startswith("not installed, and only sparse attention needs one")
    assert found["details"][0].startswith("for sparse attention: ")
    assert found["details"][0].endswith(f"nox -s build-overlay -- {RELEASE}")
    assert found["details"][1].endswith(f"pip install build/wheels/vllm-{RELEASE}/*.whl")
    assert answer.data["modules"] == []


def test_two_overlays(site: Site, tmp_path: Path) -> None:
    write_overlay(tmp_path / "second", "0.32.0.post2")
    answer = site.ask(PYTHONPATH=str(tmp_path / "second"))
    assert answer.code == 1
    found = answer.finding("overlay")
    assert found["what"] == "2 overlays are installed, but only the first is active"
    assert found["details"] == [
        f"0.32.0.post2: {tmp_path / 'second'}",
        f"0.32.0.post1: {site.packages.resolve()}",
    ]


def test_two_overlays_and_the_later_one_acts(site: Site, tmp_path: Path) -> None:
    write_overlay(tmp_path / "second", "0.32.0.post2")
    (site.packages / "a.pth").write_text(
        f"import ucm_vllm_overlay._boot; import sys; sys.path[:0] = ['{tmp_path}/second']"
    )
    found = site.ask().finding("import hook")
    assert (found["status"], found["what"]) == ("error", "in place, but for another overlay than the one found")


def test_an_overlay_that_is_reached_through_pythonpath(bare: Site, tmp_path: Path) -> None:
    write_vllm(bare.packages)
    write_overlay(tmp_path / "target")
    answer = bare.ask(PYTHONPATH=str(tmp_path / "target"))
    assert answer.code == 1
    assert answer.statuses() == {"import hook": "error", "prefix cache": "warning"}
    found = answer.finding("import hook")
    assert found["what"] == "it is installed, and its finder does not run in this process"
    assert "Python does not read .pth files in the overlay's directory:" in found["details"]
    assert any("`pip install --target`" in line for line in found["details"])
    assert found["todo"][0] == f"remove {tmp_path / 'target'} from PYTHONPATH"
    assert answer.data["import_hook"]["position"] is None
    assert answer.data["modules"][0]["loads"] == str(bare.packages / MODULES[0][0])


def test_an_editable_overlay(site: Site, tmp_path: Path) -> None:
    """The package is elsewhere; its .pth file, and one that adds its place to sys.path, are in site-packages."""
    place = tmp_path / "packages" / "vllm"
    place.mkdir(parents=True)
    (site.packages / "ucm_vllm_overlay").rename(place / "ucm_vllm_overlay")
    (site.packages / "_ucm_vllm_overlay.pth").write_text(f"{place}\n")
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (0, {})
    assert answer.finding("modules")["what"] == "4 of 4 are loaded from the overlay"
    assert answer.finding("import hook")["what"].startswith("in place, number 1 on sys.meta_path")


def test_an_overlay_in_a_directory_that_a_start_up_file_adds(bare: Site, tmp_path: Path) -> None:
    write_vllm(bare.packages)
    write_overlay(tmp_path / "below")
    (bare.packages / "below.pth").write_text(f"import site; site.addsitedir({str(tmp_path / 'below')!r})\n")
    answer = bare.ask()
    assert (answer.code, answer.statuses()) == (0, {})


def test_the_pth_is_missing(site: Site) -> None:
    (site.packages / "ucm_vllm_overlay.pth").unlink()
    answer = site.ask()
    assert f"{site.packages}/ucm_vllm_overlay.pth is missing" in answer.finding("import hook")["details"]
    assert answer.data["next"][0].startswith(
        f"reinstall the overlay wheel: `{site.python} -m pip install --force-reinstall "
    )


def test_the_pth_does_nothing(site: Site) -> None:
    (site.packages / "ucm_vllm_overlay.pth").write_text("# emptied\n")
    answer = site.ask()
    assert answer.statuses() == {"import hook": "error", "prefix cache": "warning"}
    found = answer.finding("import hook")
    assert f"{site.packages}/ucm_vllm_overlay.pth did not run when {site.python} started" in found["details"]
    assert found["todo"][0].startswith(f"reinstall the overlay wheel: `{site.python} -m pip install --force-reinstall ")


def test_a_python_that_skips_site(site: Site) -> None:
    found = site.ask(flags=("-S",), PYTHONPATH=str(site.packages)).finding("import hook")
    assert "this Python was started with -S, so it reads no .pth files" in found["details"]
    assert found["todo"][0] == "start vLLM without -S"


def test_an_isolated_python(site: Site) -> None:
    assert site.ask(flags=("-I",)).statuses() == {}


def test_a_truncated_file(site: Site) -> None:
    shadow(site).write_bytes(shadow(site).read_bytes()[:10])
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (1, {"modules": "error", "prefix cache": "warning"})
    found = answer.finding("modules")
    assert found["what"] == "1 of 4 are not as reviewed: vLLM will not start"
    assert found["details"][0] == "vllm.v1.core.sched.scheduler: vLLM's file ok, the overlay's changed"
    assert f"file:       {shadow(site).resolve()}" in found["details"]
    assert found["todo"][0].startswith("reinstall the overlay wheel: ")
    assert answer.data["modules"][0]["loads"] is None


def test_a_missing_file(site: Site) -> None:
    shadow(site).unlink()
    assert site.ask().data["modules"][0]["rewritten"] == "missing"


def test_a_truncated_manifest(site: Site) -> None:
    path = site.packages / "ucm_vllm_overlay" / "manifest.json"
    path.write_text(path.read_text()[:100])
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (1, {"overlay": "error", "prefix cache": "warning"})
    assert answer.finding("overlay")["what"] == "its manifest cannot be read"
    assert str(path.resolve()) in answer.finding("overlay")["details"][0]


def test_vllm_is_imported_at_start(site: Site) -> None:
    """By a file that Python reads before the overlay's."""
    (site.packages / "aa.pth").write_text("import vllm.v1.core.sched.scheduler\n")
    (site.packages / "sitecustomize.py").touch()
    answer = site.ask(PYTHONPATH=str(site.packages))  # before the sitecustomize of Debian's Python
    found, place = answer.finding("import hook"), site.packages.resolve()
    assert found["status"] == "error"
    assert found["what"] == "modules that it shadows were imported before its finder ran, or bypassed it"
    assert found["details"][0] == f"vllm.v1.core.sched.scheduler: {site.packages / MODULES[0][0]}"
    files = [f"{place}/aa.pth", f"{place}/sitecustomize.py"]
    assert [file for file in answer.data["start_up_files"] if file.startswith(str(place))] == files
    assert set(found["details"]) >= {f"start-up file: {file}" for file in files}


def test_a_hook_that_is_asked_first(site: Site) -> None:
    (site.packages / "patching.py").write_text(HOOK)
    (site.packages / "zz.pth").write_text("import patching\n")
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (0, {})
    assert answer.finding("import hook")["details"] == ["earlier finder, ignores our modules: patching.Stranger"]
    assert answer.data["import_hook"] == {"position": 1, "ahead": ["patching.Stranger"]}


def test_a_hook_that_is_asked_first_and_takes_a_module(site: Site) -> None:
    taking = "importlib.machinery.PathFinder.find_spec(name, path) if name.endswith('.scheduler') else None"
    (site.packages / "patching.py").write_text(
        "import importlib.machinery\n" + HOOK.replace("return None", f"return {taking}")
    )
    (site.packages / "zz.pth").write_text("import patching\n")
    answer = site.ask()
    assert (answer.code, answer.statuses()) == (1, {"import hook": "error", "prefix cache": "warning"})
    found = answer.finding("import hook")
    file = site.packages.resolve() / "vllm/v1/core/sched/scheduler.py"
    assert found["details"][0] == f"vllm.v1.core.sched.scheduler: patching.Stranger finds {file}"
    assert f"start-up file: {site.packages.resolve() / 'zz.pth'}" in found["details"]
    assert found["todo"][0].startswith("remove the package that puts this finder into sys.meta_path")


def test_an_import_of_vllm_after_the_overlay_s_start_does_no_harm(site: Site) -> None:
    (site.packages / "zz.pth").write_text("import vllm.v1.core.sched.scheduler\n")
    assert site.ask().statuses() == {}
