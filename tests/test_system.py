"""What the tests need of the system: what is missing, what is installed, and what is skipped. No real apt runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import system
from tests.system import APT_OPTIONS, SWITCH, Need, NotJudgedError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
DANCE, SING = Need("dancing", ("dance-bin",), programs=("dance",)), Need("singing", ("sing-bin",), programs=("sing",))
BOTH = (DANCE, SING)
HUM = Need("humming", ("libhum1",), libraries=("libucm-hum.so.1",))
#: Notes its arguments; "install" brings the programs of packages named NAME-bin, unless there is a file NAME-bin.fails.
APT = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >>"$here/calls"
for word; do
    case "$word" in
    update) [ -e "$here/update.fails" ] && echo "E: no such host" >&2 && exit 100 ;;
    *-bin)
        [ -e "$here/$word.fails" ] && echo "E: Unable to locate package $word" >&2 && exit 100
        printf '#!/bin/sh\\n' >"$here/${word%-bin}"
        /bin/chmod +x "$here/${word%-bin}" ;;
    esac
done
exit 0
"""


class Machine:
    """A PATH with an apt-get of our own, and what it was called with."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        for name in ("dirname", "sh"):
            (directory / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
        self.program("apt-get", APT)
        patch.setenv("PATH", str(directory))
        patch.setattr(os, "geteuid", lambda: 0)

    def program(self, name: str, text: str = "#!/bin/sh\n") -> None:
        (self.directory / name).write_text(text, encoding="utf-8")
        (self.directory / name).chmod(0o755)

    @property
    def calls(self) -> list[str]:
        file = self.directory / "calls"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [line.replace(" ".join(APT_OPTIONS), "").replace("-qq", "").strip() for line in lines]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


def test_nothing_is_called_or_said_where_nothing_is_missing(machine: Machine, said: Callable[[], str]) -> None:
    machine.program("dance")
    machine.program("sing")
    assert (system.main(BOTH), said(), machine.calls) == (0, "", [])


def test_only_what_is_missing_is_installed_and_only_once(machine: Machine, said: Callable[[], str]) -> None:
    machine.program("sing")
    assert system.main(BOTH) == 0
    assert said() == "dancing: installing dance-bin (UCM_SYSTEM_PACKAGES=no forbids it)\n"
    assert machine.calls == ["update", "install -y --no-install-recommends dance-bin"]
    assert (system.main(BOTH), said(), len(machine.calls)) == (0, "", 2)


def test_a_package_that_fails_does_not_stop_the_others(machine: Machine, said: Callable[[], str]) -> None:
    machine.program("dance-bin.fails")
    assert system.main(BOTH) == 0
    lines = said().splitlines()
    assert lines[2:] == [
        "dancing: dance not found; `apt-get update && apt-get install -y dance-bin` installs it",
        "not installed here: apt-get install dance-bin failed: E: Unable to locate package dance-bin",
    ]
    assert not SING.missing()


def test_without_a_network_no_package_is_tried(machine: Machine, said: Callable[[], str]) -> None:
    machine.program("update.fails")
    assert system.main(BOTH) == 0
    assert said().splitlines()[-1] == "not installed here: apt-get update failed: E: no such host"
    assert machine.calls == ["update"]


@pytest.mark.parametrize("case", ["forbidden", "no root", "no apt"])
def test_where_nothing_can_be_installed_the_reason_is_said(
    machine: Machine, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "forbidden":
        monkeypatch.setenv(SWITCH, "no")
    elif case == "no root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    else:
        (machine.directory / "apt-get").unlink()
    reason = {
        "forbidden": "UCM_SYSTEM_PACKAGES=no forbids it",
        "no root": f"only root can: `sudo {sys.executable} -m tests.system`",
        "no apt": "there is no apt-get",
    }[case]
    assert system.main(BOTH) == 0
    lines = said().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["dancing", "singing", "not installed here"]
    assert lines[-1] == f"not installed here: {reason}"
    assert machine.calls == []


def test_in_ci_what_is_missing_is_an_error(
    machine: Machine, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    machine.program("sing-bin.fails")
    assert system.main(BOTH) == 1
    assert said().splitlines()[-1] == "CI=true: everything must be judged"
    (machine.directory / "sing-bin.fails").unlink()
    assert system.main(BOTH) == 0


def test_packages_that_do_not_bring_what_is_needed_are_said(machine: Machine, said: Callable[[], str]) -> None:
    assert system.main((HUM,)) == 0
    assert said().splitlines()[1:] == [
        "humming: libucm-hum.so.1 not found; `apt-get update && apt-get install -y libhum1` installs it",
        "not installed here: the packages do not bring it",
    ]


def test_a_need_names_what_is_missing(machine: Machine) -> None:
    machine.program("dance")
    assert DANCE.require() == str(machine.directory / "dance")
    with pytest.raises(NotJudgedError, match="singing: sing not found; `apt-get update && apt-get install -y sing"):
        SING.require()


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    need = Need("compiling", ("headers",), files=(str(tmp_path / "a.h"), str(tmp_path / "b.h")))
    (tmp_path / "a.h").touch()
    assert need.missing() == [str(tmp_path / "b.h")]


def test_it_needs_nothing_but_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.system"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Tests of what is missing.

SUITE = """
import os
import pytest
from tests.system import Need, require_root

@pytest.fixture(scope="session")
def server():
    return Need("dancing", ("dance-bin",), programs=("ucm-dance",)).require()

def test_one(server): pass
def test_two(server): pass
def test_itself(): Need("singing", ("sing-bin",), libraries=("libucm-sing.so",)).require()
def test_of_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    require_root("only root can fly")
def test_other(record_property): record_property("not judged", "half of it")
"""
#: A module that is skipped as a whole.
SKIPPED = "import pytest\npytest.skip('elsewhere', allow_module_level=True)\n"


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pytest with the plugin on a few tests."""

    def run(ci: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
        (tmp_path / "test_whole.py").write_text(SKIPPED, encoding="utf-8")
        plugins = ("-p", "xdist", "-p", "tests.not_judged", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *plugins, "-rs"]
        told = ["--config-file=/dev/null", f"--rootdir={tmp_path}", f"--not-judged={tmp_path / 'told'}", str(tmp_path)]
        # The other plugins take longer to import than all else.
        environment = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(
            [*command, *options, *told], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_tests_of_what_is_missing_are_skipped_with_the_reason_and_told_in_one_line(
    tmp_path: Path, judge: Callable[..., subprocess.CompletedProcess[str]], options: tuple[str, ...]
) -> None:
    done = judge("", *options)
    line = "dancing (2 tests), half of it (1 tests), singing (1 tests), what only root can do (1 tests)"
    assert done.returncode == 0, done.stdout
    assert f"not judged here: {line}\n" in done.stdout
    assert "dancing: ucm-dance not found; `apt-get update && apt-get install -y dance-bin` installs it" in done.stdout
    assert "what only root can do: only root can fly" in done.stdout
    assert "1 passed, 5 skipped" in done.stdout
    assert (tmp_path / "told").read_text(encoding="utf-8") == line


def test_in_ci_tests_of_what_is_missing_fail(judge: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = judge("true")
    assert done.returncode == 1
    assert "2 failed, 1 passed, 1 skipped, 2 errors" in done.stdout
    assert "singing: libucm-sing.so not found" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_tests_for_which_the_time_was_up_are_skipped_and_counted_also_in_ci(
    judge: Callable[..., subprocess.CompletedProcess[str]], options: tuple[str, ...]
) -> None:
    done = judge("true", "--until", "1", *options)
    assert done.returncode == 0, done.stdout
    assert "not judged here: what the time did not suffice for (5 tests)\n" in done.stdout
    assert "the time of this session was up" in done.stdout
    assert "6 skipped" in done.stdout


def test_before_its_time_is_up_everything_is_judged(judge: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = judge("", "--until", "99999999999")
    assert "1 passed, 5 skipped" in done.stdout
    assert "the time" not in done.stdout
