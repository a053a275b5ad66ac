"""The census: every place is hooked or classified; a new place fails, and so does an unused classification."""

from __future__ import annotations

import ast
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.releases import REVIEWED
from tests.transforms.pipeline.memory import OUTPUT, SMALL, WORKER, WORKER_SOURCE, DictTree, product_of, small_overlay
from transforms import scheduler_output, worker
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.releases import Releases
from transforms.pipeline import build, cli
from transforms.pipeline.census import (
    Found,
    Site,
    UnclassifiedError,
    advice,
    census_path,
    census_summary,
    census_text,
    check_classified,
    current,
    hooks_of_lock,
    hooks_of_outcomes,
    judge,
    judged,
    obsolete,
    read_record,
    take,
)
from transforms.pipeline.drift.model import Drift, measure_tree
from transforms.pipeline.drift.terminal import print_matrix, print_release
from transforms.pipeline.lock import LockError, accept, make_lock
from transforms.pipeline.product import UCM, Product, products
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources.open import open_sources
from transforms.registry import VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).parents[3]
NEW = "vllm/platforms/other_worker.py"
OTHER = "vllm/v1/worker/other.py"
WORDS = "a reason that a reviewer can really check"
#: The only place that the small worker's rule hooks.
HOOKED_IN = "WorkerWrapperBase.init_device"
CALL = "self.worker.init_device()"


def counting(*elsewhere: Elsewhere) -> Product:
    """Return the small transforms with a census of only the worker's anchor."""
    census = Census("worker.starts", "starts of a worker", (CALL,), ("worker.init",), elsewhere)
    return product_of(scheduler_output.TRANSFORM, replace(worker.TRANSFORM, census=(census,)))


def _in(overlays: Path, product: Product = UCM) -> Product:
    return replace(product, overlays=overlays)


def said(*sites: str, since: str = "", before: str = "") -> Elsewhere:
    return Elsewhere(sites, Consequence.REACHES, WORDS, releases=Releases(since, before))


def call() -> str:
    return f"class Other:\n    def start(self):\n        {CALL}\n"


def tree(files: dict[str, str] | None = None, release: str = "0.32.0") -> DictTree:
    given = DictTree(release)
    given.files.update(files or {})
    return given


class Unreadable(DictTree):
    """A package whose files are listed but cannot be read."""

    def read_package(self) -> Iterator[tuple[str, bytes]]:
        raise AssertionError("the package was searched")


def sites_of(given: DictTree, product: Product) -> list[Site]:
    hooks = hooks_of_outcomes(small_overlay(given).outcomes, product)
    return judge(take(given, product), hooks, given.release, product)


def test_a_hooked_place_is_known() -> None:
    (site,) = sites_of(tree(), counting())
    assert (site.place, site.count, site.hooked, site.said, site.is_known) == (
        f"{WORKER}:{HOOKED_IN}",
        1,
        1,
        None,
        True,
    )


def test_the_lock_tells_the_same_hooks_as_the_outcomes() -> None:
    overlay = small_overlay(DictTree())
    assert hooks_of_lock(make_lock(overlay, 1), SMALL) == hooks_of_outcomes(overlay.outcomes, SMALL)


def test_a_second_call_beside_a_hooked_one_is_not_known() -> None:
    twice = WORKER_SOURCE.replace(CALL, f"{CALL}; {CALL}")
    found = take(tree({WORKER: twice}), counting())
    hooks = hooks_of_outcomes(small_overlay(tree()).outcomes, counting())
    (site,) = judge(found, hooks, "0.32.0", counting())
    assert (site.count, site.hooked, site.is_known) == (2, 1, False)
    assert "1 of 2 not hooked" in site.describe()


def test_a_place_elsewhere_is_known_once_it_is_classified() -> None:
    given = tree({OTHER: call()})
    assert [s.place for s in sites_of(given, counting()) if not s.is_known] == [f"{OTHER}:Other.start"]
    assert all(s.is_known for s in sites_of(given, counting(said("vllm/v1/*:Other.start"))))
    assert not all(s.is_known for s in sites_of(given, counting(said("vllm/v1/*:Other.start", before="0.32.0"))))


def test_what_classifies_nothing_is_obsolete() -> None:
    transforms = counting(said("vllm/v1/*:Other.*"), said("*:Other.start", "*:Gone.start"), said("*:Other.stop"))
    given = {"0.32.0": sites_of(tree({OTHER: call()}), transforms)}
    assert [pattern for _, pattern in obsolete(given, transforms)] == ["*:Other.start", "*:Gone.start", "*:Other.stop"]


def test_what_classifies_nothing_in_its_own_releases_is_obsolete() -> None:
    transforms = counting(said("*:Other.start", since="0.33.0"))
    given = {"0.32.0": sites_of(tree({OTHER: call()}), transforms)}
    assert [pattern for _, pattern in obsolete(given, transforms)] == ["*:Other.start"]


class TestRecord:
    @pytest.fixture
    def overlays(self, tmp_path: Path) -> Path:
        accept(small_overlay(DictTree(), tmp_path))
        census_path("0.32.0", _in(tmp_path)).write_text(
            census_text(tree(), _in(tmp_path, counting())), encoding="utf-8"
        )
        return tmp_path

    def test_holds_for_the_same_files_and_patterns(self, overlays: Path) -> None:
        expected = take(tree(), counting())
        assert current(Unreadable(), _in(overlays, counting())) == expected
        assert current(Unreadable(), _in(overlays, counting(said("*:Other.start")))) == expected

    def test_another_file_means_another_search(self, overlays: Path) -> None:
        changed = tree({OTHER: call()})
        assert OTHER in current(changed, _in(overlays, counting()))["worker.starts"]

    def test_another_pattern_means_another_search(self, overlays: Path) -> None:
        assert "scheduler_output.classes" in current(tree(), _in(overlays, _with_classes()))
        assert read_record("0.32.0", _in(overlays)) is not None
        assert judged(_in(overlays, counting())).keys() == {"0.32.0"}
        assert judged(_in(overlays, _with_classes())) == {}

    def test_has_nothing_but_paths_names_and_counts(self, overlays: Path) -> None:
        record = json.loads(census_path("0.32.0", _in(overlays)).read_text(encoding="utf-8"))
        assert record["sites"] == {"worker.starts": {WORKER: {HOOKED_IN: 1}}}

    def test_a_damaged_one_is_named(self, overlays: Path) -> None:
        census_path("0.32.0", _in(overlays)).write_text("{", encoding="utf-8")
        with pytest.raises(LockError, match="not JSON"):
            read_record("0.32.0", _in(overlays))
        census_path("0.32.0", _in(overlays)).write_text("{}", encoding="utf-8")
        with pytest.raises(LockError, match="damaged"):
            read_record("0.32.0", _in(overlays))


class TestDrift:
    def drift(self, tmp_path: Path, *elsewhere: Elsewhere) -> Drift:
        return measure_tree(tree({NEW: call()}), _in(tmp_path, counting(*elsewhere)))

    def test_fails_on_a_place_that_nobody_classified(self, tmp_path: Path) -> None:
        drift = self.drift(tmp_path)
        assert drift.applies
        assert not drift.passes
        text = io.StringIO()
        print_release(drift, Console(file=text, width=100))
        assert f"new place: {NEW}:Other.start: 1 not classified" in text.getvalue()
        assert f"known: {WORKER}:{HOOKED_IN}: hooked" in text.getvalue()
        assert "to do: read it in vLLM 0.32.0" in text.getvalue()
        print_matrix([drift], Console(file=text, width=100))
        assert "0 of 1 releases: no new place" in text.getvalue()

    def test_passes_once_it_is_classified(self, tmp_path: Path) -> None:
        assert self.drift(tmp_path, said("vllm/platforms/*:*.start")).passes


class TestGate:
    """Neither an acceptance nor a build gets past a place that nobody classified."""

    def build(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *elsewhere: Elsewhere) -> None:
        product, given = _in(tmp_path, counting(*elsewhere)), tree({NEW: call()})
        monkeypatch.setattr(build, "open_sources", lambda release, origin=None, cache=None, *, package=VLLM: given)
        accept(rewrite(given, product))
        build.build_overlay("0.32.0", product=product, out=tmp_path / "out")

    def test_a_build_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(
            UnclassifiedError, match=f"(?s)1 places in vLLM 0.32.0.*new place: {NEW}:Other.start"
        ) as told:
            self.build(monkeypatch, tmp_path)
        assert f"known: {WORKER}:{HOOKED_IN}: hooked" in str(told.value)
        assert not (tmp_path / "out").exists()

    def test_a_build_goes_on_once_it_is_classified(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.build(monkeypatch, tmp_path, said("vllm/platforms/*:*.start"))
        assert list((tmp_path / "out").rglob("*.whl"))

    def test_an_acceptance_is_refused_and_writes_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        product, given = _in(tmp_path / "overlays", counting()), tree({NEW: call()})
        monkeypatch.setattr(cli, "parse", lambda named: (product, named))
        monkeypatch.setattr(cli, "make_overlay", lambda release, origin=None, product=UCM: rewrite(given, product))
        monkeypatch.setattr(cli, "open_sources", lambda release, origin=None, cache=None, *, package=VLLM: given)
        monkeypatch.setattr(cli, "write_review", lambda review, out=None: tmp_path / "page.html")
        assert cli.main(["review", "0.32.0", "--accept"]) == 1
        assert f"new place: {NEW}:Other.start" in capsys.readouterr().err
        assert not (tmp_path / "overlays").exists()


def test_advice_names_the_nearest_known_places() -> None:
    given = tree({NEW: call(), OTHER: call()})
    sites = sites_of(given, counting(said(f"{OTHER}:*")))
    (new,) = (site for site in sites if not site.is_known)
    assert any(OTHER in line and WORDS in line for line in advice(new, sites, "0.32.0"))
    assert census_summary(sites) == "3 places in 3 functions and classes: 1 hooked, 1 reaches a hook, 1 not classified"


class TestNames:
    """The names census: of places that no rule hooks, in the name of a registry."""

    KEPT = "class Cache:\n    def look(self, mm_hash):\n        return self.kept[mm_hash]\n"

    def named(self, overlays: Path, *elsewhere: Elsewhere) -> Product:
        census = Census("names.media", "finds media by name", ("key (mm_hash)",), (), elsewhere)
        product = counting()
        return replace(product, registries=(replace(product.registries[0], census=(census,)),), overlays=overlays)

    def test_a_release_with_a_new_place_fails_the_drift(self, tmp_path: Path) -> None:
        given = tree({NEW: self.KEPT})
        drift = measure_tree(given, self.named(tmp_path))
        assert drift.applies
        assert not drift.passes
        (site,) = drift.unclassified
        assert (site.census.id, site.place) == ("names.media", f"{NEW}:Cache.look")
        (first, *_, last) = advice(site, drift.census, "vLLM 0.32.0")
        assert first == f"new place: {NEW}:Cache.look: 1 not classified (finds media by name)"
        assert "Say in names.media what follows" in last

    def test_it_is_fine_once_it_is_classified(self, tmp_path: Path) -> None:
        known = Elsewhere((f"{NEW}:Cache.look",), Consequence.NAMED, WORDS)
        drift = measure_tree(tree({NEW: self.KEPT}), self.named(tmp_path, known))
        assert drift.passes
        text = io.StringIO()
        print_release(drift, Console(file=text, width=200))
        assert "census of hooks: 1 places in 1 functions and classes: 1 hooked" in text.getvalue()
        assert "census of names: 1 places in 1 functions and classes: 1 found by a name" in text.getvalue()

    def test_an_overlay_is_refused(self, tmp_path: Path) -> None:
        product = self.named(tmp_path)
        given = tree({NEW: self.KEPT})
        with pytest.raises(UnclassifiedError, match=f"new place: {NEW}:Cache.look"):
            check_classified(take(given, product), rewrite(given, product))


@pytest.mark.parametrize(
    ("sites", "reason", "consequence", "refused_by", "what"),
    [
        (("a.py:f",), "too short", Consequence.HARMLESS, "", "is too short"),
        (("a.py:f",), WORDS, Consequence.REFUSED, "", "`refused_by` goes with"),
        (("a.py:f",), WORDS, Consequence.HARMLESS, "ucm.x:y", "`refused_by` goes with"),
        (("a.py",), WORDS, Consequence.HARMLESS, "", "path:qualified name"),
        ((), WORDS, Consequence.HARMLESS, "", "path:qualified name"),
        (("a.py:f",), "a b c d e f g", Consequence.HARMLESS, "", "is too short"),
        (("a.py:f",), f"TBD, {WORDS}", Consequence.HARMLESS, "", "is a placeholder: 'TBD'"),
    ],
)
def test_half_a_classification_is_refused(
    sites: tuple[str, ...], reason: str, consequence: Consequence, refused_by: str, what: str
) -> None:
    with pytest.raises(RuleDefinitionError, match=what):
        Elsewhere(sites, consequence, reason, refused_by)


# The real censuses

TRANSFORMS = [transform for product in products() for transform in product.transforms]
COUNTED = [census for product in products() for census in product.censuses]


@pytest.fixture(scope="module", params=products(), ids=lambda product: product.publisher.owner)
def product(request: pytest.FixtureRequest) -> Product:
    found: Product = request.param
    return found


@pytest.fixture(scope="module")
def reviewed(product: Product) -> dict[str, list[Site]]:
    return judged(product)


def test_every_reviewed_release_has_a_census(product: Product, reviewed: dict[str, list[Site]]) -> None:
    assert list(reviewed) == product.reviewed(), "run `nox -s regenerate`: the patterns of a census have changed"


def test_every_place_of_every_reviewed_release_is_known(reviewed: dict[str, list[Site]]) -> None:
    unknown = {release: [s.describe() for s in sites if not s.is_known] for release, sites in reviewed.items()}
    assert {release: lines for release, lines in unknown.items() if lines} == {}


def test_no_classification_is_obsolete(product: Product, reviewed: dict[str, list[Site]]) -> None:
    assert [(census.id, pattern) for census, pattern in obsolete(reviewed, product)] == []


def test_every_transform_counts_what_it_hooks_or_says_why_not() -> None:
    rules = {rule.id for transform in TRANSFORMS for rule in transform.rules}
    for transform in TRANSFORMS:
        assert bool(transform.census) != bool(transform.not_counted), transform.id
        for census in transform.census:
            assert set(census.rules) <= rules, census.id


@pytest.mark.parametrize(
    "refusal", sorted({e.refused_by for census in COUNTED for e in census.elsewhere if e.refused_by})
)
def test_what_a_classification_says_refuses_exists_and_can_refuse(refusal: str) -> None:
    module, _, name = refusal.partition(":")
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (function,) = (node for node in ast.walk(body) if isinstance(node, ast.FunctionDef) and node.name == name)
    assert any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_refuse")
        for node in ast.walk(function)
    )


def test_the_newest_release_has_what_its_census_says() -> None:
    record = read_record(REVIEWED[-1])
    assert record is not None
    found: Found = record["sites"]
    assert take(open_sources(REVIEWED[-1])) == found
    # Counted by hand in the sources.
    assert found["kv_cache_manager.allocations"] == {
        "vllm/v1/core/kv_cache_manager.py": {"KVCacheManager.allocate_slots": 1},
        "vllm/v1/core/sched/scheduler.py": {"Scheduler.schedule": 2},
    }


def _with_classes() -> Product:
    census = Census("scheduler_output.classes", "steps", ("class (SchedulerOutput)",))
    return product_of(replace(scheduler_output.TRANSFORM, census=(census,), not_counted=""), *counting().transforms[1:])


def test_paths_are_those_of_the_small_tree() -> None:
    assert {WORKER, OUTPUT} == set(DictTree().python_files())
