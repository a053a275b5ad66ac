"""The project's commands: each session installs what it needs and calls one of the packages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

GROUPS = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, group: str) -> None:
    """Install one dependency group of pyproject.toml; each module is compiled once, when it is first imported.

    Also where the environment forbids it, as in many containers: the tests start hundreds of processes.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.install("--quiet", "--no-compile", *nox.project.dependency_groups(GROUPS, group))


def prepare(session: nox.Session) -> None:
    """Install what the tests need of the system and, at the same time, of the package index."""
    with ThreadPoolExecutor(1) as beside:
        system = beside.submit(session.run, "python", "-m", "tests.system")
        install(session, "test")
        system.result()


@nox.session(name="build-overlay")
def build_overlay(session: nox.Session) -> None:
    """Build the wheels of reviewed overlays: `-- installed --python PATH`, `-- RELEASE …`; default: the newest."""
    install(session, "build")
    session.run("python", "-m", "transforms", "build-overlay", *session.posargs)


@nox.session(name="build-tools")
def build_tools(session: nox.Session) -> None:
    """Build the wheel with which other projects build overlays of their own, without this repository."""
    install(session, "build")
    session.run("python", "-m", "transforms", "build-tools", *session.posargs)


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
def adopt(session: nox.Session) -> None:
    """Adopt new releases, and list what is left to decide: `-- RELEASE … [--engines]`; `-- published`: the table."""
    install(session, "test" if "--engines" in session.posargs else "build")
    session.run("python", "-m", "tests.adopt", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Let each rule insert nothing, and demand that its tests fail: `-- RELEASE …`, `-- --engines --rule ID`."""
    install(session, "test")
    session.run("python", "-m", "tests.mutants", *session.posargs)


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
    options = ("-q", "-rs", "--config-file=/dev/null", "--rootdir=.", "--noconftest")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.not_judged")
    session.run("python", "-m", "pytest", *options, *plugins, "tests/site_in_browser.py", "tests/test_licences.py")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit tests, compare all locks, and run the core of the end-to-end tests on a real vLLM.

    As root with apt, it installs what the tests need of the system first; UCM_SYSTEM_PACKAGES=no forbids that. Tests of
    what is not there are skipped. With arguments, run only pytest, with these arguments: `-- tests/ucm -k finder`.
    """
    prepare(session)
    if session.posargs:
        session.run("pytest", *session.posargs)
    else:
        session.run("python", "-m", "tests.parts", "tests")


@nox.session
def e2e(session: nox.Session) -> None:
    """Run the end-to-end tests on real vLLM engines on the CPU: `-- [RELEASE …] [--minutes N]`.

    The default is 0.32.0 without the core, which `nox -s tests` runs, and 0.27.1 without tests marked `newest_only`.
    `-- 0.32.0` includes the core. Any other release, for instance 0.16.0 or 0.12.0, runs the tests marked `older`:
    tokens with each connector and method, and `ucm doctor --run`. After N minutes no further test begins; the last
    line counts those that were not run.
    """
    prepare(session)
    session.run("python", "-m", "tests.parts", "e2e", *session.posargs)


@nox.session
def shared(session: nox.Session) -> None:
    """Share a store between two hosts, on a CephFS that runs here (as root, with Ceph installed) or given mounts."""
    install(session, "test")
    session.run("pytest", "tests/ucm/store/test_cephfs.py", *session.posargs, env={"UCM_SHARED": "1"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run the property tests with new seeds, and save failures as examples: `-- --minutes 10 --seed 1 [PATH …]`."""
    install(session, "test")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def flaky(session: nox.Session) -> None:
    """Run the unit tests many times on a busy machine, in other orders: `-- --rounds 10 --seed 1 [PATH …]`."""
    install(session, "flaky")
    session.run("python", "-m", "tests.flaky", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Chat about a document on a real vLLM 0.32.0 with UCM, restart it, and ask again."""
    install(session, "demo")
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

    Arguments select sections: `-- real`, `-- scheduler start build`. The table shows the goal of each figure.
    """
    install(session, "test")
    session.run("python", "-m", "tests.e2e.bench", *session.posargs)
