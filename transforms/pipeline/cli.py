"""Build, review and check the overlays."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from transforms.engine.errors import OverlayError
from transforms.pipeline.adopt import Row, adopt, published, releases_page, row
from transforms.pipeline.build import Order, check_complete, complete, make_overlay, order_for, ordered
from transforms.pipeline.census import (
    FILE,
    Site,
    census_path,
    census_text,
    hooks_of_release,
    judge,
    judged,
    obsolete,
)
from transforms.pipeline.drift.machine import as_data
from transforms.pipeline.drift.model import Drift, measure
from transforms.pipeline.drift.page import write_drift
from transforms.pipeline.drift.terminal import print_censuses, print_matrix, print_release
from transforms.pipeline.generate import RELEASES, regenerate, write_changed, write_generated
from transforms.pipeline.installed import look
from transforms.pipeline.lock import accept
from transforms.pipeline.package import build_tools
from transforms.pipeline.parallel import each_release
from transforms.pipeline.product import UCM, parse, products, unpublished
from transforms.pipeline.project import PLACE, Skeleton
from transforms.pipeline.review.model import Verdict, make_review, summary
from transforms.pipeline.review.page import write_review
from transforms.pipeline.review.terminal import print_review
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.trial import check_cases
from transforms.place import BUILD, IS_CHECKOUT, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.pipeline.installed import Python
    from transforms.pipeline.package import Built
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay

#: For progress and errors; results go to standard output.
console = Console(stderr=True, highlight=False)
#: The word for what an interpreter has.
INSTALLED = "installed"
#: The word for all published releases.
PUBLISHED = "published"
NEWEST = (
    "Building for {release}, the newest reviewed release, because none was named. For the vLLM that you run: "
    "nox -s build-overlay -- installed --python /path/to/its/python"
)
#: The width of results that are written to a file or pipe.
FILE_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. An `OverlayError` is printed without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except OverlayError as error:
        say(f"error: {error}", "red")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transforms", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build-overlay", help="build the wheels of reviewed overlays")
    build.add_argument(
        "releases",
        nargs="*",
        metavar="RELEASE",
        help="releases; `installed`: what --python has; `all`: all reviewed ones; default: the newest reviewed one",
    )
    build.add_argument("--python", type=Path, metavar="PATH", help="with `installed`: the interpreter that runs vLLM")
    build.add_argument(
        "--out", type=Path, default=BUILD, metavar="DIR", help="the wheels go into DIR/wheels/; default: build/"
    )
    build.add_argument(
        "--hooks",
        choices=("default", "all"),
        default="default",
        help="hooks to insert; default: those that UCM's features use; all: also those for other people's methods",
    )
    add_origin(build)
    build.set_defaults(run=_build)

    if IS_CHECKOUT:
        tools = commands.add_parser("build-tools", help="build the wheel of these commands, for other projects")
        tools.add_argument("--out", type=Path, default=BUILD, metavar="DIR", help="default: build/")
        tools.set_defaults(run=_build_tools)

    drift = commands.add_parser("drift", help="try every rule on releases, reviewed or new, and report what moved")
    drift.add_argument(
        "releases", nargs="*", metavar="RELEASE", help="releases; default: the newest reviewed one; `all`: all of them"
    )
    drift.add_argument("--json", action="store_true", help="print JSON")
    drift.add_argument("--page", action="store_true", help="write build/drift/index.html")
    add_origin(drift)
    drift.set_defaults(run=_drift)

    review = commands.add_parser("review", help="show what an overlay changes, as a page or in the terminal; accept it")
    review.add_argument("releases", nargs="*", metavar="RELEASE", help="one release; default: the newest reviewed one")
    review.add_argument("--terminal", action="store_true", help="also print the review")
    review.add_argument(
        "--accept", action="store_true", help="write the lock and the diff; builds use them from then on"
    )
    add_origin(review)
    review.set_defaults(run=_review)

    census = commands.add_parser(
        "census", help="find code like the code that rules hook in whole releases, and update the record"
    )
    census.add_argument(
        "releases", nargs="*", metavar="RELEASE", help="releases; default: the newest reviewed one; `all`: all of them"
    )
    census.set_defaults(run=_census, origin=None, release=None)

    adopting = commands.add_parser("adopt", help="try everything on new releases; write their locks if nothing is open")
    adopting.add_argument(
        "releases",
        nargs="+",
        metavar="RELEASE",
        help="releases; `published`: a table of all published ones for the docs",
    )
    adopting.set_defaults(run=_adopt)

    generate = commands.add_parser("regenerate", help="write every lock, diff and generated page again")
    generate.add_argument("releases", nargs="*", metavar="RELEASE", help="releases; default: all reviewed ones")
    generate.set_defaults(run=_regenerate)

    init = commands.add_parser("init", help="create a project with its own rules")
    init.add_argument("directory", type=Path, metavar="DIR", help="a directory to create")
    init.add_argument("--owner", required=True, help="one lower-case word, the prefix of its releases: OWNER-0.32.0")
    init.add_argument(
        "--at", metavar="PATH:NAME", help=f"the function that its first rule hooks; default, for vLLM: {PLACE}"
    )
    init.add_argument("--project", default="", help="the package's name on the index, if it is not its import name")
    init.add_argument("--release", metavar="X.Y.Z", help="a release of that package; default: the newest reviewed one")
    init.set_defaults(run=_init)
    return parser


def add_origin(command: argparse.ArgumentParser) -> None:
    """Add the options that read sources from elsewhere than the package index."""
    command.add_argument(
        "--from",
        dest="origin",
        metavar="PATH",
        help="a virtual environment, directory, wheel or sdist with vLLM's sources, or `installed` for the environment "
        "that runs this command; default: the package index that pip uses",
    )
    command.add_argument(
        "--release", metavar="X.Y.Z", help="the release of the sources in --from, if they do not state it"
    )


def chosen_releases(options: argparse.Namespace) -> list[str | None]:
    """Return the releases that a command line selects, as it names them: ``0.32.0``, ``ascend-0.23.0``.

    Raises:
        OverlayError: If ``--from`` is given with more than one release.
    """
    names, origin = [*options.releases, *filter(None, [options.release])], options.origin
    several = len(names) > 1 or any(parse(name)[1] == "all" for name in names)
    if origin and several:
        raise OverlayError(
            "--from takes the sources of one release, but several releases are given",
            fix="give one release, or none if the sources state theirs",
        )
    if not names:
        return [None if origin else newest_reviewed()]
    return [one for name in names for one in _expanded(name)]


def _expanded(name: str) -> list[str]:
    """Expand ``all`` to the reviewed releases of its product; return any other name unchanged."""
    product, release = parse(name)
    return [product.named(one) for one in product.reviewed()] if release == "all" else [name]


def newest_reviewed() -> str:
    """Return the newest release with a reviewed overlay.

    Raises:
        OverlayError: If there is none.
    """
    reviewed = UCM.reviewed()
    if not reviewed:
        raise OverlayError(
            "no overlay has been reviewed yet", where="overlays/", fix="name a release: `nox -s review -- 0.32.0`"
        )
    return reviewed[-1]


def _build(options: argparse.Namespace) -> int:
    all_hooks = options.hooks == "all"
    executable, install = Path("/path/to/that/python"), "/path/to/that/python -m pip install"
    if options.python is not None or INSTALLED in options.releases:
        python = _interpreter(options)
        orders, why = order_for(python, all_hooks=all_hooks)
        executable, install = python.executable, python.install
    else:
        releases = chosen_releases(options)
        orders = ordered(releases, options.origin, all_hooks=all_hooks)
        why = [] if options.releases or releases == [None] else [NEWEST.format(release=releases[0])]
    for line in why:
        say(line)
    built = list(each_release(_build_one, [(one.named, one, options.out, all_hooks) for one in orders], console))
    folders = complete(built)
    for path in (path for wheels in folders.values() for path in wheels):
        print(path)  # noqa: T201 - the result
    beside = {one.wheel.parent: _beside(order) for order, one in zip(orders, built, strict=True)}
    commands = "".join(f"    {install} {shlex.quote(str(folder))}/*.whl{beside[folder]}\n" for folder in folders)
    which = "all wheels of the folder" if len(folders) == 1 else "all wheels of one of the folders"
    say(
        f"\nInstall {which} beside the release that they are for, with the Python that runs it:\n{commands}"
        f"Then run `{executable} -m ucm doctor`. The overlay's source is in {built[-1].source}."
    )
    return 0


def _beside(order: Order) -> str:
    """Return what pip must install with an overlay: the projects of its seams that are on no index."""
    product, _ = _parsed(order.named)
    return "".join(f" {shlex.quote(place)}" for place in unpublished(product))


def _build_tools(options: argparse.Namespace) -> int:
    wheel = build_tools(options.out / "wheels" / "tools")
    print(wheel)  # noqa: T201 - the result
    say(f"Install it where rules are written: python -m pip install {shlex.quote(str(wheel))}")
    return 0


def _interpreter(options: argparse.Namespace) -> Python:
    if options.releases != [INSTALLED] or options.python is None or options.origin or options.release:
        raise OverlayError(
            "`installed` and --python belong together, and no other release or origin is given beside them",
            fix="write `nox -s build-overlay -- installed --python /path/to/its/python`",
        )
    return look(options.python)


def _build_one(job: tuple[str | None, Order, Path, bool]) -> Built:
    _, one, out, all_hooks = job
    return one.build(out, all_hooks=all_hooks)


def _parsed(named: str | None) -> tuple[Product, str | None]:
    return parse(named) if named else (UCM, None)


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
        say(f"page: {write_drift(drifts)}")
    return 0 if all(drift.passes for drift in drifts) else 1


def _drift_one(job: tuple[str | None, str | None]) -> Drift:
    named, origin = job
    product, release = _parsed(named)
    return measure(release, origin, product)


def _review(options: argparse.Namespace) -> int:
    releases = chosen_releases(options)
    if len(releases) != 1:
        raise OverlayError("review takes one release at a time", fix="for instance: `nox -s review -- 0.32.0`")
    product, release = _parsed(releases[0])
    with console.status(f"{product.package.title} {release or 'from the given sources'}"):
        overlay = make_overlay(release, options.origin, product)
        review = make_review(overlay)
        page = write_review(review)
    if options.terminal:
        print_review(review, output())
    for line in [*summary(review), f"page: {page}"]:
        print(line)  # noqa: T201 - the result
    if options.accept:
        check_cases(product)
        sources = open_sources(overlay.release, options.origin, package=product.package)
        census = census_text(sources, product)
        check_complete(overlay, json.loads(census)["sites"], sources)
        _accept(overlay, census)
    elif review.verdict is not Verdict.SAME:
        given = f" --from {options.origin}" if options.origin else ""
        say(f"to accept it: nox -s review -- {overlay.named}{given} --accept")
    return 0


def _accept(overlay: Overlay, census: str) -> None:
    target = accept(overlay)
    (target / FILE).write_text(census, encoding="utf-8")
    generated = write_generated(overlay.product)
    for path in [*sorted(target.iterdir()), *generated]:
        print(f"wrote: {path}")  # noqa: T201 - the result
    say(f"Commit these files, then run: nox -s build-overlay -- {overlay.named}")


def _adopt(options: argparse.Namespace) -> int:
    if options.releases == [PUBLISHED]:
        jobs = [(one.named(release), release) for one in products() for release in published(one)]
        rows = list(each_release(_row, jobs, console))
        titles = {one: [row for product, row in rows if product == one] for one in dict.fromkeys(p for p, _ in rows)}
        for path in write_changed({RELEASES: releases_page(titles)}):
            print(path)  # noqa: T201 - the result
        return 0
    adoptions = []
    for named in options.releases:
        product, release = parse(named)
        adoptions.append(adopt(named, product, release))
        print(adoptions[-1].markdown())  # noqa: T201 - the result
    return 1 if any(one.decisions for one in adoptions) else 0


def _row(job: tuple[str, str]) -> tuple[str, Row]:
    named, release = job
    product, _ = parse(named)
    return product.package.title, row(named, product, release)


def _census(options: argparse.Namespace) -> int:
    releases = [release for release in chosen_releases(options) if release]
    taken = list(each_release(_census_one, [(release,) for release in releases], console, "census of"))
    paths = {named: census_path(release, product) for named in releases for product, release in [parse(named)]}
    other = [named for named, text, _ in taken if _kept(paths[named]) != text]
    write_changed({paths[named]: text for named, text, _ in taken})
    searched = {parse(named)[0] for named in releases}
    stale = [found for product in searched for found in obsolete(judged(product), product)]
    print_censuses({named: sites for named, _, sites in taken}, stale, output())
    if other:
        updated = f"{FILE} was out of date for {', '.join(other)} and has been updated"
        say(f"{updated}; check it with git diff, and commit it")
    unknown = any(not site.is_known for _, _, sites in taken for site in sites)
    return 1 if other or unknown or stale else 0


def _kept(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _census_one(job: tuple[str]) -> tuple[str, str, list[Site]]:
    (named,) = job
    product, release = parse(named)
    text = census_text(open_sources(release, package=product.package), product, anew=True)
    return named, text, judge(json.loads(text)["sites"], hooks_of_release(release, product), release, product)


def _init(options: argparse.Namespace) -> int:
    skeleton = Skeleton(options.owner, options.release or "", options.at or "", options.project)
    for path in skeleton.write(options.directory):
        print(path)  # noqa: T201 - the result
    say(
        f"\nInstall it in this environment: {sys.executable} -m pip install -e {shlex.quote(str(options.directory))}\n"
        f"Then: python -m transforms drift {options.owner}-{skeleton.tried}. Its README has the other commands."
    )
    return 0


def say(text: str, style: str | None = None) -> None:
    """Print progress, advice or an error, with commands that exist where it is shown."""
    console.print(command(text), style=style, markup=False, soft_wrap=True)


def output() -> Console:
    """Return the console for results."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else FILE_WIDTH)


def _regenerate(options: argparse.Namespace) -> int:
    named = [one for name in options.releases for one in _expanded(name)]
    own = [p.named(release) for p in products() for release in p.reviewed() if "+" not in release]
    changed = regenerate(named or own, console)
    for path in changed:
        print(path)  # noqa: T201 - the result
    if changed:
        say("these files were out of date and have been updated: check them, and commit them")
        return 1
    say("every lock, diff and generated page is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
