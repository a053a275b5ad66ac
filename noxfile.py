"""The project's commands: each session installs what it needs and calls one of the packages."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Iterator

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

GROUPS = nox.project.load_toml("pyproject.toml")
#: Releases for the end-to-end tests: the newest with a CPU build, and the oldest that works with the same torch.
E2E_RELEASES = ("0.32.0", "0.27.1")
INSTALL_VLLM = ("python", "-m", "tests.e2e.install_vllm")
#: Engines are single-threaded and often wait, so three run at a time on two cores. Tests of one file run in one process
#: and share fixtures.
THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
#: Many unit tests wait for servers and other processes, so there are three test processes for two cores.
UNIT_PROCESSES = str(max(2, 3 * (os.cpu_count() or 2) // 2))


def install(session: nox.Session, group: str) -> None:
    """Install one dependency group of pyproject.toml; the modules that are imported are compiled then."""
    session.install("--quiet", "--no-compile", *nox.project.dependency_groups(GROUPS, group))


@nox.session(name="build-overlay")
def build_overlay(session: nox.Session) -> None:
    """Build the wheels of reviewed overlays: `-- RELEASE …`, `-- all`; default: the newest."""
    install(session, "build")
    session.run("python", "-m", "transforms", "build-overlay", *session.posargs)


@nox.session
def review(session: nox.Session) -> None:
    """Show what an overlay changes in a release, as a page and in the terminal: `-- RELEASE [--accept]`."""
    install(session, "build")
    session.run("python", "-m", "transforms", "review", *session.posargs)


@nox.session
def drift(session: nox.Session) -> None:
    """Try every rule on a release, reviewed or new: `-- RELEASE`, `-- all`."""
    install(session, "build")
    session.run("python", "-m", "transforms", "drift", *session.posargs)


@nox.session
def census(session: nox.Session) -> None:
    """Search whole releases for code of the kinds that rules hook, and compare with the record: `-- all`."""
    install(session, "build")
    session.run("python", "-m", "transforms", "census", *session.posargs)


@nox.session
def regenerate(session: nox.Session) -> None:
    """Regenerate every lock, diff and generated page, also the examples'; fail if any was out of date."""
    install(session, "build")
    session.run("python", "-m", "tests.examples", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pytest", "-q", "tests/ucm/test_api.py")  # type-checks against the built wheel


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into build/docs strictly and offline, check its links, and visit its pages."""
    install(session, "docs")
    session.run("mkdocs", "build", "--quiet", env={"NO_MKDOCS_2_WARNING": "true", "PYTHONPATH": "."})
    # The site in a browser, and the licences of this session's packages. pytest's usual settings need packages that are
    # not installed here.
    options = ("-q", "-rs", "--config-file=/dev/null", "--rootdir=.", "--noconftest", "-p", "no:cacheprovider")
    session.run("python", "-m", "pytest", *options, "tests/site_in_browser.py", "tests/test_licences.py")


@contextlib.contextmanager
def beside(session: nox.Session, *command: str) -> Iterator[None]:
    """Run a command in the background of a ``with`` statement, in the session's environment; wait for it at the end."""
    process = subprocess.Popen([f"{session.bin}/{command[0]}", *command[1:]], start_new_session=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    if process.wait():
        session.error(f"failed: {' '.join(command)}")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit tests, compare all locks, and run the core of the end-to-end tests on a real vLLM.

    With arguments, run only pytest, with these arguments: `-- tests/ucm -k finder`.
    """
    install(session, "test")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    with beside(session, *INSTALL_VLLM, E2E_RELEASES[0]):
        session.run("pytest", "-n", UNIT_PROCESSES, "-m", "not e2e")
        session.run("python", "-m", "transforms", "regenerate")
    session.run("pytest", *THREE_AT_A_TIME, "-m", "core", "tests/e2e", env={"UCM_E2E_RELEASE": E2E_RELEASES[0]})


@nox.session
def e2e(session: nox.Session) -> None:
    """Run the end-to-end tests on real vLLM engines on the CPU: `-- RELEASE …`.

    The default is 0.32.0 without the core, which `nox -s tests` runs, and 0.27.1 without tests marked `newest_only`.
    `-- 0.32.0` includes the core. Any other release, for instance 0.16.0 or 0.12.0, runs the tests marked `older`:
    tokens with each connector and method, and `ucm doctor --run`.
    """
    install(session, "test")
    releases = session.posargs or E2E_RELEASES
    for release, following in zip(releases, [*releases[1:], None], strict=True):
        which = "e2e and not older" if release == E2E_RELEASES[0] else "e2e and not older and not newest_only"
        if release not in E2E_RELEASES:
            which = "older"
        elif release == E2E_RELEASES[0] and not session.posargs:
            which += " and not core"
        options = [*THREE_AT_A_TIME, "--durations=20", "-m", which]
        installing = beside(session, *INSTALL_VLLM, following) if following else contextlib.nullcontext()
        with installing:
            session.run("pytest", *options, "tests/e2e", env={"UCM_E2E_RELEASE": release})


@nox.session
def shared(session: nox.Session) -> None:
    """Share a store between two hosts on one CephFS, which runs here; root only, with Ceph's programs installed."""
    install(session, "test")
    session.run("pytest", "tests/ucm/store/test_cephfs.py", *session.posargs, env={"UCM_SHARED": "1"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run the property tests with new seeds, and save failures as examples: `-- --minutes 10 --seed 1 [PATH …]`."""
    install(session, "test")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Generate some text on a real vLLM 0.32.0 with the overlay, and show which hooks fired."""
    install(session, "build")
    session.run("python", "-m", "tests.e2e.demo", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """Run vLLM's own tests without and with the overlay and compare: `-- 0.32.0`."""
    install(session, "build")
    session.run("python", "-m", "tests.e2e.parity", *session.posargs)


@nox.session
def campaign(session: nox.Session) -> None:
    """Kill, damage, fill and remove stores at random, and check the blocks they serve: `-- --count 500 --seed 1`."""
    install(session, "test")
    session.run("python", "-m", "tests.campaign", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the costs and savings of the overlay and the prefix cache, compared with plain vLLM and with peers.

    Arguments select sections: `-- ttft`, `-- scheduler start build`. The table shows the goal of each figure.
    """
    install(session, "test")
    session.run("python", "-m", "tests.e2e.bench", *session.posargs)
