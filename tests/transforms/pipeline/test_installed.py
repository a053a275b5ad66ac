"""`build-overlay -- installed --python PATH`: what another interpreter has, and folders that one command installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.transforms.pipeline.test_cli import run
from tests.transforms.pipeline.third_party import of_vllm
from tests.ucm.overlay.environment import Environment
from tests.ucm.overlay.miniature import RELEASE, SCHEDULER, write_miniature
from transforms.pipeline.build import Order, order_for, ordered
from transforms.pipeline.cli import main
from transforms.pipeline.installed import InstalledError, Place, Python, installed, look
from transforms.pipeline.lock import read_lock
from transforms.pipeline.package import build_wheel
from transforms.pipeline.product import OWN, UCM, compose
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

ASCEND = compose(OWN[1])


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment with the miniature vLLM."""
    made = Environment.create(tmp_path / "venv")
    write_miniature(made.site)
    return made


def ask(repository: Path, python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(repository, "build-overlay", "installed", "--python", str(python), *arguments)


def ask_of_each(repository: Path, environments: Sequence[Environment]) -> subprocess.CompletedProcess[str]:
    """Ask about several environments in one process, because its imports take longer than each answer."""
    each = [["build-overlay", "installed", "--python", str(one.python)] for one in environments]
    code = f"from transforms.pipeline.cli import main; raise SystemExit(max([main(one) for one in {each!r}]))"
    return subprocess.run([sys.executable, "-c", code], cwd=repository, check=False, capture_output=True, text=True)


def other_metadata(root: Path, version: str) -> Environment:
    """Return an environment with the miniature vLLM, which says that it is some version."""
    made = Environment.create(root)
    write_miniature(made.site)
    stated(made, version)
    return made


def stated(environment: Environment, version: str, name: str = "vllm") -> None:
    """Give the miniature vLLM other metadata."""
    (old,) = environment.site.glob("vllm-*.dist-info")
    shutil.rmtree(old)
    if version:
        about = environment.site / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "RECORD").write_text("vllm/__init__.py,,\n")


def test_the_printed_command_installs_the_folder_and_the_doctor_agrees(
    repository: Path, environment: Environment
) -> None:
    """pip resolves the wheels' dependencies, with no index: nothing of ours is asked for by name."""
    # pip and the runtime's dependencies are those of the tests
    there = {str(metadata.distribution(name).locate_file("")) for name in ("numpy", "pip", "xxhash")}
    environment.write("tools.pth", "\n".join(there))
    done = ask(repository, environment.python)
    assert done.returncode == 0, done.stderr
    assert (
        f"vLLM {RELEASE}, by the content of {environment.site.resolve() / 'vllm'} (its metadata: vllm {RELEASE})\n"
        in done.stderr
    )
    (command,) = (line.strip() for line in done.stderr.splitlines() if line.startswith("    "))
    assert command.startswith(f"{environment.python} -m pip install ")
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_QUIET": "1"}
    subprocess.run(["/bin/sh", "-c", command], check=True, env=environ, cwd=environment.root)
    assert environment.origin(SCHEDULER) == environment.overlay_file(SCHEDULER)


def test_the_sources_are_the_installed_ones(repository: Path, environment: Environment, tmp_path: Path) -> None:
    """The index is not asked, and the wheel is the same as from elsewhere."""
    environ = {"PIP_NO_INDEX": "1", "UCM_OVERLAY_CACHE": str(tmp_path / "cache")}
    done = run(repository, "build-overlay", "installed", "--python", str(environment.python), **environ)
    other = run(repository, "build-overlay", "--from", str(environment.site), "--out", str(tmp_path / "other"))
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + other.stderr
    for one, same in zip(done.stdout.splitlines(), other.stdout.splitlines(), strict=True):
        assert Path(one).read_bytes() == Path(same).read_bytes()


def test_what_start_up_files_print_is_no_answer(environment: Environment) -> None:
    environment.write("noise.pth", "import sys; print('{}', end='')\n")
    assert look(environment.python).places["vllm"] == Place(environment.site.resolve(), "vllm", RELEASE)


def test_without_pip_the_command_is_uv_s(environment: Environment) -> None:
    python = look(environment.python)
    assert not python.has_pip
    assert python.install == f"uv pip install --python {environment.python}"


def test_the_content_decides_and_the_metadata_may_say_anything(repository: Path, tmp_path: Path) -> None:
    versions = (f"{RELEASE}+cu129", "0.99.1.dev5+gabcdef0", "nightly", "")
    done = ask_of_each(repository, [other_metadata(tmp_path / f"{number}", versions[number]) for number in range(4)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"ucm_vllm_overlay-{RELEASE}.post1-py3") == len(versions)
    for version in versions:
        assert f"(its metadata: {f'vllm {version}' if version else 'no version'})" in done.stderr


def test_an_editable_checkout(repository: Path, environment: Environment, tmp_path: Path) -> None:
    """Its metadata is in site-packages, its files are elsewhere."""
    stated(environment, f"{RELEASE}.dev3+g0123456")
    checkout = tmp_path / "vllm-checkout"
    checkout.mkdir()
    (environment.site / "vllm").rename(checkout / "vllm")
    (environment.site / f"vllm-{RELEASE}.dev3+g0123456.dist-info" / "RECORD").write_text("__editable__.vllm.pth,,\n")
    environment.write("__editable__.vllm.pth", f"{checkout}\n")
    done = ask(repository, environment.python)
    assert done.returncode == 0, done.stderr
    assert f"by the content of {checkout / 'vllm'} (its metadata: vllm {RELEASE}.dev3+g0123456)" in done.stderr


def test_a_vllm_in_the_current_directory_is_not_the_installed_one(repository: Path, environment: Environment) -> None:
    (repository / "vllm").mkdir()
    (repository / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    assert ask(repository, environment.python).returncode == 0


def test_edited_files_are_named(repository: Path, environment: Environment) -> None:
    environment.upstream_file(SCHEDULER).write_text("# mine\n")
    done = ask(repository, environment.python)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"error: these files of vLLM {RELEASE} are not those of vLLM {RELEASE}:\n    vllm/v1/core/sched/scheduler.py\n"
    )
    assert f"nox -s review -- --from {environment.site.resolve()} --release {RELEASE}+mine --accept`" in done.stderr


def test_a_release_that_was_not_reviewed(repository: Path, tmp_path: Path) -> None:
    cases = [
        ("1.2.3", "vLLM 1.2.3 has not been reviewed", "1.2.3"),
        ("1.2.3.dev4+gabc", "vLLM 1.2.3.dev4+gabc has not been reviewed", "1.2.3.dev4"),
        ("", "this vLLM states no release", "X.Y.Z"),
    ]
    environments = [other_metadata(tmp_path / f"{number}", version) for number, (version, _, _) in enumerate(cases)]
    for environment in environments:
        environment.upstream_file(SCHEDULER).write_text("# of another release\n")
    done = ask_of_each(repository, environments)
    assert (done.returncode, done.stdout) == (1, "")
    errors = done.stderr.split("error: ")
    assert errors.pop(0) == ""
    for environment, (_, what, name), error in zip(environments, cases, errors, strict=True):
        assert error.startswith(
            f"{what}, and its files are those of no reviewed release; the newest reviewed release is {RELEASE}\n"
        )
        assert f"nox -s drift -- --from {environment.site.resolve()} --release {name}`" in error


def test_a_file_that_cannot_be_read(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    root = environment.site.resolve()
    for path in (module["path"] for module in (read_lock("0.32.0") or {})["modules"]):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    python = look(environment.python)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InstalledError, match="a file of vLLM cannot be read: Permission denied") as caught:
        installed(python)
    assert caught.value.where.startswith(str(root))


def test_no_vllm(repository: Path, tmp_path: Path) -> None:
    """A directory named vllm that is no package does not count either."""
    bare = Environment.create(tmp_path / "bare")
    (bare.site / "vllm").mkdir()
    done = ask(repository, bare.python)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: vLLM is not installed there\n  where: {bare.python}\n")


def test_what_is_no_interpreter(tmp_path: Path) -> None:
    script, silent = tmp_path / "python", tmp_path / "silent"
    script.write_text("#!/bin/sh\necho 'SyntaxError: invalid syntax' >&2\nexit 1\n")
    script.chmod(0o755)
    silent.write_text("")
    for place, what in (
        (tmp_path / "none", "there is no such interpreter"),
        (tmp_path, "a directory is not an interpreter"),
        (script, "it is no Python 3.10 or newer: it said SyntaxError: invalid syntax"),
        (silent, "it cannot be run"),
    ):
        with pytest.raises(InstalledError, match=what) as caught:
            look(place)
        assert "--python" in caught.value.fix


@pytest.mark.parametrize(
    "arguments",
    [["installed"], [RELEASE, "--python", "x"], ["installed", RELEASE, "--python", "x"], ["--python", "x"]],
    ids=" ".join,
)
def test_installed_and_python_belong_together(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["build-overlay", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nox -s build-overlay -- installed --python /path/to/its/python`" in err


def test_the_default_says_which_release_and_how_to_get_another(repository: Path, miniature: Path) -> None:
    cached = {"PIP_NO_INDEX": "1", "UCM_OVERLAY_CACHE": str(repository / "cache"), "PIP_FIND_LINKS": ""}
    said = (
        f"Building for {RELEASE}, the newest reviewed release, because none was named. For the vLLM that you run: "
        "nox -s build-overlay -- installed --python /path/to/its/python\n"
    )
    assert said in run(repository, "build-overlay", **cached).stderr
    assert said not in run(repository, "build-overlay", "--from", str(miniature)).stderr


class TestFolders:
    def test_a_new_version_replaces_the_old_one_and_nothing_else(self, tmp_path: Path) -> None:
        """So that pip, given the whole folder, finds one version of each."""
        project = tmp_path / "pyproject.toml"
        (tmp_path / "module.py").touch()
        text = (
            "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
            "[project]\nname = 'acme-overlay'\nversion = '{}'\n"
            "[tool.hatch.build.targets.wheel]\nonly-include = ['module.py']\n"
        )
        folder = tmp_path / "wheels"
        folder.mkdir()
        for other in ("acme_overlay_more-1.0-py3-none-any.whl", "acme_overlay-1.0.txt"):
            (folder / other).touch()
        for version in ("1.0", "2.0"):
            project.write_text(text.format(version))
            wheel = build_wheel(tmp_path, folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            "acme_overlay-1.0.txt",
            wheel.name,
            "acme_overlay_more-1.0-py3-none-any.whl",
        ]
        assert wheel.name.startswith("acme_overlay-2.0-")

    def test_vllm_ascend_s_folder_has_the_overlay_of_its_vllm(self) -> None:
        assert ordered(["ascend-0.23.0.post1"], None, all_hooks=False) == [
            Order("0.23.0", None, "vllm-ascend-0.23.0.post1"),
            Order("ascend-0.23.0.post1", None, "vllm-ascend-0.23.0.post1"),
        ]
        assert ordered(["0.23.0"], None, all_hooks=False) == [Order("0.23.0")]
        with_all = ordered(["ascend-0.23.0"], None, all_hooks=True)
        assert {one.folder for one in with_all} == {"vllm-ascend-0.23.0-all-hooks"}

    def test_vllm_ascend_s_folder_has_the_overlay_of_vllm_that_is_named_with_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        known = {one.owner: one for one in (*OWN, of_vllm(tmp_path))}
        monkeypatch.setattr("transforms.pipeline.product.registries", lambda: known)
        folder = "vllm-ascend-0.23.0"
        assert ordered(["ascend-0.23.0", "ucm+acme-0.23.0", "0.32.0"], None, all_hooks=False) == [
            Order("ucm+acme-0.23.0", None, folder),
            Order("ascend-0.23.0", None, folder),
            Order("0.32.0"),
        ]

    def test_a_copy_of_vllm_ascend_s_sources_has_no_vllm(self, tmp_path: Path, miniature: Path) -> None:
        """Then vLLM's come from the index; from an environment with both, both are taken."""
        (tmp_path / "vllm_ascend").mkdir()
        vllm, ascend = ordered(["ascend-0.23.0"], str(tmp_path), all_hooks=False)
        assert (vllm.origin, ascend.origin) == (None, str(tmp_path))
        vllm, _ = ordered(["ascend-0.23.0"], str(miniature), all_hooks=False)
        assert vllm.origin is None  # another release's
        write_miniature(tmp_path, "0.23.0")
        vllm, _ = ordered(["ascend-0.23.0"], str(tmp_path), all_hooks=False)
        assert vllm.origin == str(tmp_path)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """An interpreter with the published files of vLLM and vLLM Ascend 0.23.0, as far as they are rewritten."""
    root = tmp_path_factory.mktemp("site")
    for product in (UCM, ASCEND):
        lock = read_lock("0.23.0", product)
        assert lock is not None
        paths = [module["path"] for module in lock["modules"]]
        for path, data in open_sources("0.23.0", package=product.package).read_many(paths).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
    places = {"vllm": Place(root, "vllm", "0.23.0+empty"), "vllm_ascend": Place(root, "vllm-ascend", "0.23.0")}
    return Python(Path(sys.executable), places, has_pip=True)


def contents(release: str) -> dict[str, str]:
    lock = read_lock(release, ASCEND)
    assert lock is not None
    return {module["path"]: module["upstream_sha256"] for module in lock["modules"]}


class TestAscend:
    def test_both_overlays_go_into_one_folder(self, python: Python) -> None:
        orders, why = order_for(python, all_hooks=False)
        assert [(one.named, one.folder) for one in orders] == [
            ("0.23.0", "vllm-ascend-0.23.0"),
            ("ascend-0.23.0", "vllm-ascend-0.23.0"),
        ]
        assert [line.partition(",")[0] for line in why] == ["vLLM 0.23.0", "vLLM Ascend 0.23.0"]

    @pytest.mark.parametrize("version", ["0.23.0", "0.23.0.post1+local", "0.24.0"])
    def test_metadata_only_chooses_among_releases_with_these_contents(self, python: Python, version: str) -> None:
        root = python.places["vllm_ascend"].root
        places = {**python.places, "vllm_ascend": Place(root, "vllm-ascend", version)}
        _, (_, tree, _) = installed(replace(python, places=places))
        fitting = [one for one in ASCEND.reviewed() if contents(one) == contents("0.23.0")]
        public = version.partition("+")[0]
        assert tree.release == (public if public in fitting else fitting[-1])

    def test_a_vllm_ascend_that_was_not_reviewed_is_named(self, python: Python, tmp_path: Path) -> None:
        places = {**python.places, "vllm_ascend": Place(tmp_path, "vllm-ascend", "9.9.9")}
        with pytest.raises(InstalledError, match=r"vLLM Ascend 9\.9\.9 has not been reviewed") as caught:
            installed(replace(python, places=places))
        assert f"nox -s review -- --from {tmp_path} --release ascend-9.9.9`" in caught.value.fix
