"""Several owners: third-party registries and packages, and rules that meet ours in one module."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomllib

from tests.examples import EXAMPLES
from tests.transforms.pipeline.third_party import WORDS, of_vllm, write_project, write_rocket, write_seam
from tests.ucm.overlay.environment import Environment
from tests.ucm.overlay.miniature import RELEASE, SCHEDULER, write_miniature
from transforms.ascend.registry import REGISTRY as ASCEND
from transforms.ascend.registry import VLLM_ASCEND
from transforms.engine.edits import AtStart
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.governance import QUESTIONS
from transforms.engine.rule import rule
from transforms.engine.scope import Scope
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.conflicts import conflicts
from transforms.pipeline.lock import accept, check_reviewed, compare, make_lock
from transforms.pipeline.package import build_package, build_runtime, build_tools, build_wheel
from transforms.pipeline.product import UCM, Product, ProductError, compose, parse
from transforms.pipeline.project import PLACE, ProjectError, Skeleton
from transforms.pipeline.review.model import make_review, summary
from transforms.pipeline.review.page import write_review
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.local import open_directory
from transforms.place import ROOT
from transforms.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from transforms.engine.registry import Registry

PATH = "vllm/v1/core/sched/scheduler.py"
LIVES = f"""
from {SCHEDULER} import Scheduler
from types import SimpleNamespace
request = SimpleNamespace(request_id="a")
scheduler = Scheduler()
scheduler.add_request(request)
scheduler._free_request(request)
"""
#: A program that prints the calls of the other project's seam.
TOLD = f"{LIVES}\nfrom acme_seam.hooks import CALLS\nprint(CALLS)"


def made(product: Product, miniature: Path) -> Overlay:
    overlay = rewrite(open_directory(miniature, None), product)
    assert not overlay.failures, [o.describe() for o in overlay.failures]
    check_overlay(overlay)
    return overlay


def in_the_way(acme: Registry, miniature: Path, code: str, diverts: str = "") -> list[str]:
    """Return the conflicts of `_free_request` when the other project inserts some code at its start, first."""
    (lives,) = (t for t in acme.transforms if t.id == "acme.lives")
    freed = rule("acme.lives.freed", Scope("Scheduler._free_request"), AtStart(code), diverts=diverts)
    other = replace(lives, rules=tuple(freed if r.id == freed.id else r for r in lives.rules))
    registry = replace(acme, transforms=tuple(other if t is lives else t for t in acme.transforms))
    overlay = made(compose(REGISTRY, registry), miniature)
    return [told for told in conflicts(overlay) if "_free_request, acme" in told]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("acme")


@pytest.fixture(scope="module")
def acme(place: Path) -> Registry:
    return of_vllm(place)


@pytest.fixture(scope="module")
def composed(acme: Registry, miniature: Path) -> Overlay:
    """An overlay with UCM's rules, then the other project's."""
    return made(compose(REGISTRY, acme), miniature)


@pytest.fixture(scope="module")
def wheels(place: Path, composed: Overlay, acme: Registry, miniature: Path) -> dict[str, Path]:
    """The wheels of the combined overlay, of each owner's own, and of the runtime."""
    alone = made(compose(acme), miniature)
    ours = replace(made(UCM, miniature), product=replace(UCM, overlays=place / "ours"))
    built = {}
    for name, overlay in {"both": composed, "acme": alone, "ucm": ours}.items():
        accept(overlay)
        built[name] = build_package(overlay, check_reviewed(overlay), place / name).wheel
    return {**built, "runtime": build_runtime(place)}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = Environment.create(tmp_path / "venv")
    write_miniature(environment.site)
    write_seam(environment.site)
    return environment


class TestComposition:
    def test_each_rule_stands_under_its_owner_s_name_and_calls_its_owner_s_seam(self, composed: Overlay) -> None:
        (module,) = (module for module in composed.modules if module.path == PATH)
        text = module.rewritten.decode()
        assert "from acme_seam import hooks as _acme_seam_hooks  # ucm: acme.lives.import\n" in text
        assert "_acme_seam_hooks.told('freed')  # ucm: acme.lives.freed\n" in text
        assert "_ucm_hooks.request_freed(self, request)  # ucm: scheduler.freed\n" in text
        assert "# Changed by the Acme overlay for vLLM" in text
        assert [t.id for t in module.transforms] == ["scheduler", "acme.lives"]

    def test_where_rules_meet_is_named_in_the_lock_with_their_order(self, composed: Overlay) -> None:
        lock = make_lock(composed, 1)
        assert lock["owners"] == ["ucm", "acme"]
        assert lock["conflicts"] == [
            (
                f"{PATH}: one anchor has scheduler.freed and acme.lives.freed; their order there: acme.lives.freed, "
                "scheduler.freed"
            ),
            f"{PATH}: switching scheduler off also takes the hooks of Acme along",
            f"{PATH}: switching acme off also takes the hooks of UCM along",
        ]
        (module,) = (module for module in composed.modules if module.path == PATH)
        text = module.rewritten.decode()
        assert text.index("told('freed')") < text.index("request_freed(self")

    def test_a_new_conflict_is_not_what_was_reviewed(self, composed: Overlay) -> None:
        lock = make_lock(composed, 1)
        told = compare({**lock, "conflicts": lock["conflicts"][1:]}, lock)
        assert told == ["the conflicts between rules of several owners have changed"]

    def test_the_order_is_the_stated_one(self, acme: Registry, miniature: Path) -> None:
        other = made(compose(acme, REGISTRY), miniature)
        (module,) = (module for module in other.modules if module.path == PATH)
        text = module.rewritten.decode()
        assert text.index("request_freed(self") < text.index("told('freed')")
        assert any("their order there: scheduler.freed, acme.lives.freed" in told for told in conflicts(other))

    def test_an_insertion_that_may_leave_is_in_the_way_of_what_follows(
        self, place: Path, acme: Registry, miniature: Path
    ) -> None:
        """No anchor is shared, so only the flow of control connects the two."""
        told = in_the_way(acme, miniature, "if request is None:\n    return None", diverts=WORDS)
        assert f"Scheduler._free_request, acme.lives.freed may keep scheduler.freed from running: {WORDS}" in told[0]

    def test_an_insertion_that_changes_what_another_reads_is_told(self, acme: Registry, miniature: Path) -> None:
        told = in_the_way(acme, miniature, "request = _acme_seam_hooks.told(request)")
        assert "Scheduler._free_request, acme.lives.freed assigns request, which scheduler.freed uses" in told[0]

    @pytest.mark.parametrize(
        ("code", "told"),
        [
            ("_acme_seam_hooks.told(0)\nrequest = None", "assigns request, which scheduler.freed uses"),
            ("del request", "assigns request, which scheduler.freed uses"),
            ("import json as request", "assigns request, which scheduler.freed uses"),
            ("def request():\n    ...", "assigns request, which scheduler.freed uses"),
            ("global _ucm_hooks\n_ucm_hooks = None", "assigns _ucm_hooks, which scheduler.freed uses"),
            ("self._free_request = print", "may replace Scheduler._free_request, which has scheduler.freed"),
            ("setattr(self, '_free_request', print)", "may replace Scheduler._free_request, which has scheduler.freed"),
        ],
    )
    def test_every_way_to_bind_a_name_is_told(self, acme: Registry, miniature: Path, code: str, told: str) -> None:
        assert any(told in one for one in in_the_way(acme, miniature, code))

    def test_a_name_of_the_module_is_that_of_every_function(self, acme: Registry, miniature: Path) -> None:
        told = in_the_way(acme, miniature, "global _ucm_hooks\n_ucm_hooks = None")
        users = {one.rpartition("which ")[2].removesuffix(" uses") for one in told}
        assert {"scheduler.freed", "scheduler.preempted"} < users

    def test_an_insertion_that_does_neither_is_in_nobodys_way(self, acme: Registry, miniature: Path) -> None:
        assert in_the_way(acme, miniature, "_acme_seam_hooks.told(request)") == []

    def test_one_owner_alone_meets_nobody(self, overlay: Overlay) -> None:
        assert not {"owners", "conflicts"} & make_lock(overlay, 1).keys()

    def test_it_can_be_read(self, composed: Overlay, tmp_path: Path) -> None:
        review = make_review(composed)
        page = write_review(review, tmp_path).read_text(encoding="utf-8")
        assert "scheduler+acme.lives" in page
        assert "Record of acme.lives" in page
        assert any(line.startswith("owners meet: ") for line in summary(review))

    def test_both_hooks_are_called(self, environment: Environment, wheels: dict[str, Path]) -> None:
        environment.install(wheels["both"], wheels["runtime"])
        assert environment.run(TOLD) == "['added', 'freed']"
        assert environment.run(TOLD, UCM_DISABLE_PATCHES="1") == "[]"

    @pytest.mark.parametrize("group", ["SCHEDULER", "ACME"])
    def test_a_switch_takes_the_other_owner_s_hooks_along_and_says_so(
        self, environment: Environment, wheels: dict[str, Path], group: str
    ) -> None:
        environment.install(wheels["both"], wheels["runtime"])
        done = environment.start("-c", TOLD, **{f"UCM_DISABLE_{group}_PATCH": "1"})
        assert done.stdout.strip() == "[]", done.stderr
        other = {"SCHEDULER": "acme", "ACME": "scheduler"}[group]
        assert f"group {other} stays upstream's: it relies on {group.lower()}, which is off" in done.stderr

    def test_its_version_names_the_others(self, wheels: dict[str, Path]) -> None:
        assert wheels["both"].name == f"acme_vllm_overlay-{RELEASE}.post1+with.ucm-py3-none-any.whl"
        assert wheels["acme"].name == f"acme_vllm_overlay-{RELEASE}.post1-py3-none-any.whl"


class TestTwoOverlays:
    def test_of_one_module_are_refused_with_the_way_to_build_them_as_one(
        self, environment: Environment, wheels: dict[str, Path]
    ) -> None:
        environment.install(wheels["ucm"], wheels["acme"], wheels["runtime"])
        error = environment.fail(LIVES)
        assert f"2 overlays shadow {SCHEDULER}, but only one of them would be active" in error
        assert f"acme-vllm-overlay {RELEASE}.post1" in error
        assert f"ucm-vllm-overlay {RELEASE}.post1" in error
        assert f"`nox -s build-overlay -- acme+ucm-{RELEASE}`" in error or (
            f"`nox -s build-overlay -- ucm+acme-{RELEASE}`" in error
        )
        report = environment.start("-m", "ucm", "doctor").stdout
        assert f"2 overlays shadow {SCHEDULER}, but only one of them would be active" in report

    def test_the_plug_in_says_it_before_any_import(self, environment: Environment, wheels: dict[str, Path]) -> None:
        environment.install(wheels["ucm"], wheels["acme"], wheels["runtime"])
        error = environment.fail("from acme_vllm_overlay._plugin import register; register()")
        assert "but only one of them would be active" in error

    def test_one_of_which_is_switched_off_leave_the_other_alone(
        self, environment: Environment, wheels: dict[str, Path]
    ) -> None:
        environment.install(wheels["ucm"], wheels["acme"], wheels["runtime"])
        assert environment.run(TOLD, UCM_DISABLE_SCHEDULER_PATCH="1") == "['added', 'freed']"

    def test_a_seam_that_is_not_installed(self, environment: Environment, wheels: dict[str, Path]) -> None:
        environment.install(wheels["acme"], wheels["runtime"])
        shutil.rmtree(environment.site / "acme_seam")
        error = environment.fail(LIVES)
        assert "hooks: acme_seam.hooks.told" in error
        assert "install the project of Acme that has acme_seam.hooks, in the release that this overlay needs\n" in error
        assert "ucm_runtime" not in error


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that the commands need, because they write into their checkout."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("transforms", "ucm", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    return place


def run_commands(project: Path, checkout: Path, *commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run build commands in an environment with another project, until one fails.

    They share an interpreter, because its imports take longer than each of them.
    """
    environ = {**os.environ, "PYTHONPATH": str(project)}
    code = f"from transforms.pipeline.cli import main; raise SystemExit(any(map(main, {commands!r})))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=checkout, check=False, capture_output=True, text=True, env=environ)


def wheels_in(printed: str) -> list[Path]:
    """Return the wheels that `build-overlay` printed."""
    return [Path(line) for line in printed.splitlines() if line.endswith(".whl")]


class TestAPackageThatNobodyKnows:
    """A registry and an entry point suffice for the commands, the lock, the wheel and the finder to work."""

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        return write_project(tmp_path / "project")

    def test_it_is_reviewed_built_installed_and_imported(self, project: Path, checkout: Path, tmp_path: Path) -> None:
        sources = write_rocket(tmp_path / "sources")
        given = ("rocket-1.0", "--from", str(sources))

        early = run_commands(project, checkout, ("drift", *given), ("build-overlay", *given))
        assert "Rocket 1.0: every rule applies" in early.stdout
        assert "the overlay of Rocket 1.0 has not been reviewed" in early.stderr
        built = run_commands(project, checkout, ("review", *given, "--accept"), ("build-overlay", *given))
        assert built.returncode == 0, built.stderr
        assert (project / "overlays" / "rocket-1.0" / "lock.json").is_file()
        assert not (checkout / "docs").exists()  # what follows from our locks is not written again
        wheels = wheels_in(built.stdout)

        environment = Environment.create(tmp_path / "venv")
        environment.install(*wheels)
        write_rocket(environment.site / "..").joinpath("rocket").rename(environment.site / "rocket")
        write_seam(environment.site)
        code = (
            "from rocket.engine import FUEL, Rocket, __spec__; from acme_seam.hooks import CALLS; Rocket().launch()\n"
            "print(len(CALLS), FUEL, __spec__.origin)"
        )
        calls, fuel, origin = environment.run(code).split()
        assert (calls, fuel) == ("1", "kerosene")
        assert origin.endswith("rocket_overlay/modules/rocket/engine.py")
        (environment.site / "rocket" / "engine.py").write_text("class Rocket: ...\n", encoding="utf-8")
        refused = environment.fail(code)
        assert "rocket.engine is not the file of Rocket 1.0 that this overlay was made from" in refused
        assert "`nox -s build-overlay -- rocket-RELEASE`" in refused


COMET = "class Comet:\n    def appear(self):\n        return True\n\n\ndef seen():\n    return Comet().appear()\n"
HEARD = "from acme_overlay.hooks import LISTENERS; LISTENERS.append(lambda *given: print(len(given)))\n"
SEEN = "from comet.sky import seen; seen()"


def write_comet(place: Path) -> None:
    (place / "comet").mkdir(parents=True)
    (place / "comet" / "__init__.py").touch()
    (place / "comet" / "sky.py").write_text(COMET, encoding="utf-8")


#: What a person writes in place of the skeleton's questions.
ANSWERS = {
    "why": "Comets are counted elsewhere, which misses those that appear at night.",
    "upstream.reason": "the maintainers of comets were asked and have not answered",
    "removal": "Comets call a listener of their own when they appear.",
    "not_counted": "Nothing else in the package makes a comet appear.",
}


#: The help that a project names in its registry.
AT = 'url="https://acme.example/help", '


def answer(rules: Path) -> None:
    """Write an answer to each question of a skeleton."""
    text = rules.read_text(encoding="utf-8")
    for field, words in ANSWERS.items():
        assert text.count(QUESTIONS[field]) == 1, field
        text = re.sub(f'"[^"]*{re.escape(QUESTIONS[field])}[^"]*"', f'"{words}"', text)
    rules.write_text(text, encoding="utf-8")


class TestASkeleton:
    """The project that `init` writes can be installed and tried unchanged, and accepted once its record is written."""

    @pytest.mark.parametrize(
        ("arguments", "release", "write", "code"),
        [
            ((), RELEASE, write_miniature, LIVES),
            (("--at", "comet/sky.py:Comet.appear"), "1.0", write_comet, SEEN),
        ],
    )
    def test_it_is_tried_at_once_and_builds_when_its_record_is_written(
        self,
        checkout: Path,
        tmp_path: Path,
        arguments: tuple[str, ...],
        release: str,
        write: Callable[[Path], object],
        code: str,
    ) -> None:
        sources, installed = tmp_path / "sources", tmp_path / "installed"
        write(sources)
        wanted = ("init", str(tmp_path / "project"), "--owner", "acme", "--release", release)
        made = run_commands(checkout, checkout, (*wanted, *arguments))
        assert made.returncode == 0, made.stderr
        wheel = build_wheel(tmp_path / "project", tmp_path / "wheels")
        install([wheel], installed)

        given = (f"acme-{release}", "--from", str(sources))
        accepted = ("review", *given, "--accept")
        asked = run_commands(installed, checkout, ("drift", *given), accepted)
        assert asked.returncode == 1
        assert "every rule applies" in asked.stdout
        rules = installed / "acme_overlay" / "rules.py"
        lines = rules.read_text(encoding="utf-8").splitlines()
        for field in ANSWERS:
            at = next(number for number, line in enumerate(lines, 1) if QUESTIONS[field] in line)
            named = f"{rules}:{at}: `{field}` of acme.first (acme.first.begins): write {QUESTIONS[field]}\n"
            assert named in asked.stderr
        assert not (installed / "overlays").exists()

        answer(rules)
        built = run_commands(installed, checkout, accepted, ("build-overlay", *given))
        assert built.returncode == 0, built.stderr

        environment = Environment.create(tmp_path / "venv")
        environment.install(*wheels_in(built.stdout), wheel)
        write(environment.site)
        assert environment.run(HEARD + code) == "1"  # `self`

    @pytest.mark.parametrize(
        ("owner", "place", "problem"),
        [
            ("Acme Corp", PLACE, "an owner is one lower-case word"),
            ("acme", "comet.sky:Comet", "a place is"),
            ("acme", "comet/sky.py:", "a place is"),
        ],
    )
    def test_what_cannot_be_a_project_is_refused(self, owner: str, place: str, problem: str) -> None:
        with pytest.raises(ProjectError, match=problem):
            Skeleton(owner, "1.0", place)

    def test_a_release_that_is_none_is_refused(self) -> None:
        with pytest.raises(ProjectError, match="a release is a version"):
            Skeleton("acme", "newest")

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").touch()
        with pytest.raises(ProjectError, match="the directory is not empty"):
            Skeleton("acme", "0.32.0").write(tmp_path)

    def test_rules_for_vllm_ascend_go_with_ours(self, tmp_path: Path) -> None:
        Skeleton("acmenpu", project="vllm-ascend").write(tmp_path)
        registry: Registry = runpy.run_path(str(tmp_path / "acmenpu_overlay" / "rules.py"))["REGISTRY"]
        assert compose(ASCEND, registry).package is VLLM_ASCEND
        assert registry.distribution == "acmenpu-vllm-ascend-overlay"
        assert Skeleton("acme").tried == UCM.reviewed()[-1]

    def test_a_place_in_another_package_than_the_named_one_makes_no_package_of_ours(self) -> None:
        assert Skeleton("acme", "1.0", "comet/sky.py:Comet", "vllm-ascend").known is None
        with pytest.raises(ProjectError, match="a release is a version"):
            Skeleton("acme", place="comet/sky.py:Comet")


def test_a_package_of_another_project_s_own_is_told_where_ours_is(acme: Registry) -> None:
    own = replace(acme, package=replace(acme.package, authors="somebody else"))
    with pytest.raises(ProductError, match="registries for different packages") as caught:
        compose(REGISTRY, own)
    assert "from transforms.registry" in caught.value.fix


def test_pages_of_two_builds_are_two_files(acme: Registry, miniature: Path, tmp_path: Path) -> None:
    products = (UCM, compose(acme), compose(REGISTRY, acme), compose(acme, REGISTRY))
    pages = [write_review(make_review(made(product, miniature)), tmp_path) for product in products]
    assert len(set(pages)) == len(products)


class TestTheTooling:
    """Another project needs one wheel and no checkout."""

    def test_its_wheel_does_everything_in_an_empty_directory(self, tmp_path: Path) -> None:
        installed, empty, sources = tmp_path / "installed", tmp_path / "empty", tmp_path / "sources"
        empty.mkdir()
        write_comet(sources)
        install([build_tools(tmp_path / "wheels")], installed)
        shipped = {path: path.stat().st_mtime_ns for path in installed.rglob("*.*") if "__pycache__" not in path.parts}
        wanted = ("init", "acme", "--owner", "acme", "--at", "comet/sky.py:seen", "--release", "1.0")
        assert run_commands(installed, empty, wanted).returncode == 0
        rules = empty / "acme" / "acme_overlay" / "rules.py"
        answer(rules)
        text = rules.read_text(encoding="utf-8")
        rules.write_text(text.replace("REGISTRY = Registry(", f"REGISTRY = Registry({AT}"), encoding="utf-8")
        project = build_wheel(empty / "acme", tmp_path / "acme")
        install([project], installed)
        (installed / "overlays").mkdir()

        given = ("acme-1.0", "--from", str(sources))
        commands = ("drift", *given), ("review", *given, "--accept"), ("build-overlay", *given)
        done = run_commands(installed, empty, *commands)
        assert done.returncode == 0, done.stderr
        assert [path.name.partition("-")[0] for path in wheels_in(done.stdout)] == ["ucm_runtime", "acme_comet_overlay"]
        assert all(path.is_relative_to(empty) for path in wheels_in(done.stdout))
        assert f"wrote: {installed / 'overlays' / 'comet-1.0' / 'lock.json'}" in done.stdout
        assert f"/*.whl {project}\n" in done.stderr  # on no index, and the overlay requires it
        assert "nox" not in done.stdout + done.stderr
        assert "python -m transforms build-overlay acme-1.0" in done.stderr
        assert {path: path.stat().st_mtime_ns for path in shipped} == shipped

        environment = Environment.create(tmp_path / "venv")
        overlay = next(path for path in wheels_in(done.stdout) if path.name.startswith("acme"))
        environment.install(overlay)
        write_comet(environment.site)
        alone = environment.fail("import comet.sky")
        assert "in the folder that `python -m transforms build-overlay` wrote" in alone
        environment.install(project, wheels_in(done.stdout)[0])
        assert environment.run(HEARD + SEEN) == "0"  # a function gives its hook nothing
        (environment.site / "comet" / "sky.py").write_text("def seen(): ...\n", encoding="utf-8")
        refused = environment.fail("import comet.sky")
        told = "`, where ucm-overlay-tools and the rules of Acme are installed (https://acme.example/help)\n"
        assert f"you have: `python -m transforms build-overlay acme-RELEASE{told}" in refused
        assert f"--from <its environment> --release acme-1.0+mine --accept{told}" in refused
        report = environment.start("-m", "ucm", "doctor").stdout
        assert f"you have: `python -m transforms build-overlay acme-RELEASE{told}" in report
        assert "nox" not in alone + refused

        ours = run_commands(installed, empty, ("review", "0.99.0", "--from", str(write_miniature(sources)), "--accept"))
        assert "UCM's own overlays are part of the tooling, which is not changed" in ours.stderr

    def test_its_dependencies_are_those_of_our_sessions(self) -> None:
        projects = (ROOT / "transforms" / "pyproject.toml", ROOT / "pyproject.toml")
        of_tools, ours = (tomllib.loads(path.read_text(encoding="utf-8")) for path in projects)
        assert of_tools["project"]["dependencies"] == ours["dependency-groups"]["build"]
        assert of_tools["project"]["version"] == ours["project"]["version"]


def install(wheels: list[Path], target: Path) -> None:
    """Install wheels into a directory, as pip does in an environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, *map(str, wheels)], check=True)


class TestThePageForOthers:
    """The page 'Move your patch to an overlay' uses the example `early_kv`."""

    def test_what_it_shows_is_the_example(self) -> None:
        page = (ROOT / "docs" / "move_your_patch.md").read_text(encoding="utf-8")
        shown = re.findall(r'```(?:python|toml) title="examples/early_kv/([\w./]+)"\n(.*?)```', page, re.DOTALL)
        assert len(shown) >= 4
        for name, text in shown:
            assert text.strip("\n") in (EXAMPLES / "early_kv" / name).read_text(encoding="utf-8"), name


class TestProducts:
    def test_a_name_without_a_product_is_ours(self) -> None:
        assert parse("0.32.0") == (UCM, "0.32.0")
        assert parse("all") == (UCM, "all")
        assert parse("0.32.0+mine") == (UCM, "0.32.0+mine")

    def test_an_owner_that_nobody_registered(self) -> None:
        with pytest.raises(ProductError, match="there is no registry of nobody"):
            parse("nobody-0.32.0")
        with pytest.raises(ProductError, match="there is no registry of nobody"):
            parse("ucm+nobody-0.32.0")

    def test_two_owners_of_one_group_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ProductError, match="share the name") as caught:
            compose(REGISTRY, of_vllm(tmp_path, group="scheduler"))
        assert "ucm and acme: scheduler" in caught.value.where

    def test_a_record_that_is_refused_is_named_with_its_entry_point(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project = write_project(tmp_path)
        rules = project / "rocket_rules" / "__init__.py"
        rules.write_text(rules.read_text().replace("Governance(WORDS", 'Governance("a b c d e f"'), encoding="utf-8")
        monkeypatch.syspath_prepend(str(project))
        with pytest.raises(ProductError, match="`why` is too short") as caught:
            parse("rocket-1.0")
        assert caught.value.where == "transform rocket.launch, the entry point rocket = rocket_rules:REGISTRY"
        assert caught.value.fix.startswith("write at least")

    def test_an_address_for_help_is_one_that_a_browser_can_trust(self, acme: Registry) -> None:
        with pytest.raises(RuleDefinitionError, match="not an https address") as caught:
            replace(acme, url="http://acme.example")
        assert caught.value.where == "registry acme: http://acme.example"

    def test_an_id_without_its_owner_s_name_is_refused(self, acme: Registry) -> None:
        with pytest.raises(RuleDefinitionError, match="does not start with its owner's name"):
            replace(acme, owner="other")
