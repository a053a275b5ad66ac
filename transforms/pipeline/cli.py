"""The commands of the build, and how their outcomes are told to a person."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from transforms.engine.errors import OverlayError
from transforms.pipeline.build import build_overlay, make_overlay
from transforms.pipeline.drift.machine import as_data
from transforms.pipeline.drift.model import Drift, measure
from transforms.pipeline.drift.page import write_drift
from transforms.pipeline.drift.terminal import print_matrix, print_release
from transforms.pipeline.generate import regenerate, write_generated
from transforms.pipeline.lock import accept, reviewed_releases
from transforms.pipeline.package import BUILD, Built, build_runtime
from transforms.pipeline.parallel import each_release
from transforms.pipeline.review.model import Verdict, make_review, summary
from transforms.pipeline.review.page import write_review
from transforms.pipeline.review.terminal import print_review

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.pipeline.rewrite import Overlay

#: Progress and errors go here, results to standard output.
console = Console(stderr=True, highlight=False)
#: The width of results where no terminal gives one.
FILE_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. An `OverlayError` is told without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except OverlayError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
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

    drift = commands.add_parser("drift", help="try every rule on releases, also ones never seen, and say what moved")
    drift.add_argument("releases", nargs="*", metavar="RELEASE", help="default: the newest reviewed one; `all`: each")
    drift.add_argument("--json", action="store_true", help="for a program")
    drift.add_argument("--page", action="store_true", help="write build/drift/index.html")
    add_origin(drift)
    drift.set_defaults(run=_drift)

    review = commands.add_parser("review", help="read an overlay before it is accepted: a page, or the terminal")
    review.add_argument("releases", nargs="*", metavar="RELEASE", help="one; default: the newest reviewed one")
    review.add_argument("--terminal", action="store_true", help="print the review as well")
    review.add_argument("--accept", action="store_true", help="write lock and diff: from now on this is what is built")
    add_origin(review)
    review.set_defaults(run=_review)

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
        help="a virtual environment, directory, wheel or sdist that has vLLM, or `installed` for the environment that "
        "runs this command; default: the package index that pip uses",
    )
    command.add_argument(
        "--release", metavar="X.Y.Z", help="which release the sources of --from are, where they do not state it"
    )


def chosen_releases(options: argparse.Namespace) -> list[str | None]:
    """The releases that a command line means.

    Raises:
        OverlayError: If it names one twice over, or several for the same sources.
    """
    names, origin = [*options.releases, *filter(None, [options.release])], options.origin
    if origin and (len(names) > 1 or names == ["all"]):
        raise OverlayError(
            "--from names the sources of one release, and the command line names several",
            fix="name one release with --from, or none where the sources state it",
        )
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
    releases = chosen_releases(options)
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


def _drift(options: argparse.Namespace) -> int:
    jobs = [(release, options.origin) for release in chosen_releases(options)]
    drifts = list(each_release(_drift_one, jobs, console))
    if options.json:
        print(json.dumps(as_data(drifts), indent=1, ensure_ascii=False))  # noqa: T201 - the result
    elif len(drifts) == 1:
        print_release(drifts[0], output())
    else:
        print_matrix(drifts, output())
    if options.page:
        console.print(f"page: {write_drift(drifts)}", markup=False, soft_wrap=True)
    return 0 if all(drift.applies for drift in drifts) else 1


def _drift_one(job: tuple[str | None, str | None]) -> Drift:
    return measure(*job)


def _review(options: argparse.Namespace) -> int:
    releases = chosen_releases(options)
    if len(releases) != 1:
        raise OverlayError("review reads one release at a time", fix="for instance: `nox -s review -- 0.32.0`")
    with console.status(f"vLLM {releases[0] or 'from the given sources'}"):
        overlay = make_overlay(releases[0], options.origin)
        review = make_review(overlay)
        page = write_review(review)
    if options.terminal:
        print_review(review, output())
    for line in [*summary(review), f"page: {page}"]:
        print(line)  # noqa: T201 - the result
    if options.accept:
        _accept(overlay)
    elif review.verdict is not Verdict.SAME:
        given = f" --from {options.origin}" if options.origin else ""
        console.print(
            f"when you have read it: nox -s review -- {overlay.release}{given} --accept", markup=False, soft_wrap=True
        )
    return 0


def _accept(overlay: Overlay) -> None:
    target = accept(overlay)
    write_generated()
    for path in sorted(target.iterdir()):
        print(f"wrote: {path}")  # noqa: T201 - the result
    console.print(
        f"and with them the fingerprints and docs/transforms.md. Commit all of it, then: "
        f"nox -s build-overlay -- {overlay.release}",
        markup=False,
        soft_wrap=True,
    )


def output() -> Console:
    """The console of results."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else FILE_WIDTH)


def _regenerate(options: argparse.Namespace) -> int:
    changed = regenerate(options.releases or [r for r in reviewed_releases() if "+" not in r], console)
    for path in changed:
        print(path)  # noqa: T201 - the result
    if changed:
        console.print("these files were not up to date; read the change with git diff, and commit it", markup=False)
        return 1
    console.print("every lock, diff and generated page is up to date", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
