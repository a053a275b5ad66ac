"""The commands of the build, and how their outcomes are told to a person."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from transforms.engine.errors import OverlayError
from transforms.pipeline.build import build_overlay
from transforms.pipeline.generate import regenerate
from transforms.pipeline.lock import reviewed_releases
from transforms.pipeline.package import BUILD, Built, build_runtime
from transforms.pipeline.parallel import each_release

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Progress and errors go here, results to standard output.
console = Console(stderr=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. An `OverlayError` is told without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except OverlayError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped", markup=False)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transforms", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build-overlay", help="build the wheels of reviewed overlays")
    build.add_argument("releases", nargs="*", metavar="RELEASE", help="default: the newest reviewed one; `all`: each")
    build.add_argument("--out", type=Path, default=BUILD, metavar="DIR", help="default: build/")
    add_origin(build)
    build.set_defaults(run=_build)

    generate = commands.add_parser("regenerate", help="write every lock, diff and generated page anew")
    generate.add_argument("releases", nargs="*", metavar="RELEASE", help="default: all reviewed ones")
    generate.set_defaults(run=_regenerate)
    return parser


def add_origin(command: argparse.ArgumentParser) -> None:
    """The option that names where sources come from, where not from the package index."""
    command.add_argument(
        "--from",
        dest="origin",
        metavar="PATH",
        help="a directory, wheel or sdist of vLLM, or `installed`; default: the package index that pip uses",
    )


def chosen_releases(names: list[str], origin: str | None) -> list[str | None]:
    """The releases that a command line means."""
    if names == ["all"]:
        return [*reviewed_releases()]
    if not names:
        return [None if origin else newest_reviewed()]
    return [*names]


def newest_reviewed() -> str:
    """The newest release whose overlay was reviewed.

    Raises:
        OverlayError: If there is none.
    """
    reviewed = reviewed_releases()
    if not reviewed:
        raise OverlayError(
            "no overlay has been reviewed yet", where="overlays/", fix="name a release: `nox -s review -- 0.32.0`"
        )
    return reviewed[-1]


def _build(options: argparse.Namespace) -> int:
    releases = chosen_releases(options.releases, options.origin)
    jobs = [(release, options.origin, options.out) for release in releases]
    built = list(each_release(_build_one, jobs, console))
    runtime = build_runtime(options.out)
    for path in (runtime, *(one.wheel for one in built)):
        print(path)  # noqa: T201 - the result
    console.print(
        f"\nInstall both wheels beside the vLLM that they are for:\n    pip install {runtime} {built[-1].wheel}\n"
        f"Then ask: ucm doctor. The source of the overlay lies in {built[-1].source}.",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _build_one(job: tuple[str | None, str | None, Path]) -> Built:
    release, origin, out = job
    return build_overlay(release, origin, out=out)


def _regenerate(options: argparse.Namespace) -> int:
    changed = regenerate(options.releases or reviewed_releases(), console)
    for path in changed:
        print(path)  # noqa: T201 - the result
    if changed:
        console.print("these files were not up to date; read the change with git diff, and commit it", markup=False)
        return 1
    console.print("every lock, diff and generated page is up to date", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
