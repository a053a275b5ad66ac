"""A kept result is used where everything that it depends on is the same, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import libcst as cst
import pytest

from tests.transforms.pipeline.memory import SMALL, WORKER, DictTree, product_of
from transforms import scheduler_output, worker
from transforms.engine.edits import AtStart
from transforms.engine.releases import ALL_RELEASES, Absent
from transforms.pipeline import build, results
from transforms.pipeline.checks import CheckError
from transforms.pipeline.product import Product
from transforms.pipeline.sources.cache import Cache
from transforms.registry import VLLM

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.pipeline.rewrite import Overlay


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """The modules parsed since the last `make`; results are kept in a directory of the test's own."""
    monkeypatch.setenv("UCM_OVERLAY_CACHE", str(tmp_path / "cache"))
    sources: list[bytes] = []
    parse = cst.parse_module

    def noted(source: str | bytes, *args: Any, **kwargs: Any) -> cst.Module:
        if isinstance(source, bytes):
            sources.append(source)
        return parse(source, *args, **kwargs)

    monkeypatch.setattr(cst, "parse_module", noted)
    return sources


@dataclass
class Maker:
    """Makes overlays of trees in memory."""

    monkeypatch: pytest.MonkeyPatch
    parsed: list[bytes]

    def make(self, tree: DictTree | None = None, product: Product = SMALL) -> Overlay:
        tree = tree or DictTree()
        self.monkeypatch.setattr(build, "open_sources", lambda release, origin=None, cache=None, *, package=VLLM: tree)
        self.parsed.clear()
        return build.make_overlay(tree.release, product=product)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch, parsed: list[bytes]) -> Maker:
    return Maker(monkeypatch, parsed)


def test_the_second_overlay_is_the_first_and_parses_nothing(maker: Maker) -> None:
    first = maker.make()
    assert len(maker.parsed) == len(first.modules) == 2
    assert maker.make() == first
    assert maker.parsed == []


def test_a_module_that_gains_nothing_is_not_parsed_again(maker: Maker) -> None:
    reason = "releases of this test have another worker, which nothing hooks"
    module = replace(worker.TRANSFORM.module, absent=(Absent(ALL_RELEASES, reason),))
    product = product_of(scheduler_output.TRANSFORM, replace(worker.TRANSFORM, module=module))
    tree = DictTree()
    tree.files[WORKER] = "class OtherWorker: ...\n"
    first = maker.make(tree, product)
    assert [len(maker.parsed), len(first.modules)] == [2, 1]
    assert maker.make(tree, product) == first
    assert maker.parsed == []


def test_another_source_is_rewritten(maker: Maker) -> None:
    maker.make()
    tree = DictTree()
    tree.files[WORKER] += "\n\ndef more():\n    return 1\n"
    changed = next(module for module in maker.make(tree).modules if module.path == WORKER)
    assert maker.parsed == [tree.read(WORKER)]
    assert b"def more" in changed.rewritten


def test_another_release_is_rewritten(maker: Maker) -> None:
    maker.make()
    overlay = maker.make(DictTree("0.31.0"))
    assert len(maker.parsed) == 2
    assert all(b"for vLLM 0.31.0." in module.rewritten for module in overlay.modules)


def test_another_rule_is_applied(maker: Maker) -> None:
    product = product_of(worker.TRANSFORM)
    maker.make(product=product)
    (rule,) = worker.TRANSFORM.rules[:1]
    late = replace(rule, variants=tuple(replace(v, name="late") for v in rule.variants))
    other = replace(worker.TRANSFORM, rules=(late, *worker.TRANSFORM.rules[1:]))
    overlay = maker.make(product=product_of(other))
    assert len(maker.parsed) == 1
    assert any(outcome.variant == "late" for outcome in overlay.outcomes)


def test_other_hooks_are_checked_against(maker: Maker, tmp_path: Path) -> None:
    maker.make()
    hooks = tmp_path / "hooks.py"
    hooks.write_text("def unrelated():\n    pass\n", encoding="utf-8")
    product = Product((replace(SMALL.registries[0], hooks=hooks),), SMALL.overlays)
    for _ in range(2):  # a result that fails a check is not kept
        with pytest.raises(CheckError, match="calls a hook"):
            maker.make(product=product)
        assert maker.parsed


def test_other_code_finds_no_result(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    maker.make()
    monkeypatch.setattr(results, "_code", lambda: "changed")
    maker.make()
    assert len(maker.parsed) == 2


@pytest.mark.parametrize("damage", [b"", b"not compressed", None])
def test_a_damaged_result_is_made_again(maker: Maker, damage: bytes | None) -> None:
    first = maker.make()
    for file in (Cache().root / "results").glob("*/*"):
        file.write_bytes(file.read_bytes()[:-9] if damage is None else damage)
    assert maker.make() == first
    assert len(maker.parsed) == 2
    assert maker.make() == first
    assert maker.parsed == []


def test_the_code_of_a_foreign_edit_is_not_known(maker: Maker) -> None:
    @dataclass(frozen=True)
    class Mine(AtStart):
        pass

    (rule,) = worker.TRANSFORM.rules[:1]
    form = replace(rule.variants[0], edit=Mine("_ucm_hooks.worker_init(self)"))
    other = replace(worker.TRANSFORM, rules=(replace(rule, variants=(form,)),), cases=worker.TRANSFORM.cases[:1])
    for _ in range(2):
        maker.make(product=product_of(other))
        assert maker.parsed


def test_a_cache_that_cannot_be_written_costs_only_time(maker: Maker) -> None:
    root = Cache().root
    root.mkdir()
    (root / "results").write_text("a file", encoding="utf-8")
    for _ in range(2):
        assert len(maker.make().modules) == 2
        assert len(maker.parsed) == 2


def test_old_code_loses_its_results(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(results.VERSIONS + 2):
        monkeypatch.setattr(results, "_code", lambda version=version: f"version{version}")
        maker.make()
        os.utime(Cache().root / "results" / f"version{version}", (version, version))
    kept = sorted(path.name for path in (Cache().root / "results").iterdir())
    assert kept == [f"version{version}" for version in range(2, results.VERSIONS + 2)]
