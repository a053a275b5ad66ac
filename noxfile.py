"""The front door: each session installs what it needs and calls one of the packages."""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

GROUPS = nox.project.load_toml("pyproject.toml")
#: The real vLLMs that the end-to-end tests run: the newest with a CPU build, and the oldest that takes the same torch.
E2E_RELEASES = ("0.32.0", "0.27.1")


def install(session: nox.Session, group: str) -> None:
    """Install one dependency group of pyproject.toml."""
    session.install("--quiet", *nox.project.dependency_groups(GROUPS, group))


@nox.session(name="build-overlay")
def build_overlay(session: nox.Session) -> None:
    """Build the wheels of a reviewed overlay: `-- RELEASE …`, `-- all`; the newest by default."""
    install(session, "build")
    session.run("python", "-m", "transforms", "build-overlay", *session.posargs)


@nox.session
def review(session: nox.Session) -> None:
    """Show what changes in a release, page and terminal: `-- RELEASE [--accept]`."""
    install(session, "build")
    session.run("python", "-m", "transforms", "review", *session.posargs)


@nox.session
def drift(session: nox.Session) -> None:
    """Try every rule on a release, also one never seen: `-- RELEASE`, `-- all`."""
    install(session, "build")
    session.run("python", "-m", "transforms", "drift", *session.posargs)


@nox.session
def regenerate(session: nox.Session) -> None:
    """Write every lock, diff and generated page anew; fails if one of them was not up to date."""
    install(session, "build")
    session.run("python", "-m", "transforms", "regenerate", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests, the end-to-end ones on real vLLMs and the comparison of all locks among them.

    With arguments, only pytest runs, with those: `-- tests/ucm -k finder`.
    """
    install(session, "test")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    session.run("pytest", "-n", "auto", "-m", "not e2e")
    session.notify("regenerate")
    session.notify("e2e")


@nox.session
def e2e(session: nox.Session) -> None:
    """Run the end-to-end tests on real vLLM engines on the CPU: `-- RELEASE …`.

    By default all of them on the newest release, and on an older one those that tell of the release.
    """
    install(session, "test")
    for release in session.posargs or E2E_RELEASES:
        all_of_them = session.posargs or release == E2E_RELEASES[0]
        which = "e2e" if all_of_them else "e2e and not newest_only"
        session.run("pytest", "--durations=12", "-m", which, "tests/e2e", env={"UCM_E2E_RELEASE": release})


@nox.session
def demo(session: nox.Session) -> None:
    """Generate a little on a real vLLM 0.32.0 with the overlay, and show that its hooks fired."""
    install(session, "build")
    session.run("python", "-m", "tests.e2e.demo", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """Run vLLM's own tests without and with the overlay and compare: `-- 0.32.0`."""
    install(session, "build")
    session.run("python", "-m", "tests.e2e.parity", *session.posargs)


@nox.session
def campaign(session: nox.Session) -> None:
    """Kill, damage, fill and remove stores at random, and count what was served: `-- --count 500 --seed 1`."""
    install(session, "test")
    session.run("python", "-m", "tests.campaign", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what the overlay and the prefix cache cost and save, side by side with plain vLLM and with peers.

    With arguments, only those sections: `-- ttft`, `-- scheduler start build`; the table names the goal of each figure.
    """
    install(session, "test")
    session.run("python", "-m", "tests.e2e.bench", *session.posargs)
