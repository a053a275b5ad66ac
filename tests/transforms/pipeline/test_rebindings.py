"""Replacements of vLLM's functions by another package: how they are found, and what they do to the hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.transforms.pipeline.memory import DictTree
from transforms.ascend.registry import REGISTRY
from transforms.engine.errors import OverlayError
from transforms.pipeline.product import compose
from transforms.pipeline.rebindings import Fate, Kind, fates, paired, rebindings
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from collections.abc import Mapping

ASCEND = compose(REGISTRY)
SOURCE = """\
import vllm.v1.engine.core
import vllm.envs as envs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core import kv_cache_utils
import vllm.v1.outputs as outputs

_before = Scheduler.schedule


def schedule(self):
    return _before(self)


def copied(self):
    return 1


class Core(vllm.v1.engine.core.EngineCore):
    pass


class Balance(Scheduler):
    pass


Scheduler.schedule = schedule
Scheduler.add_request = copied
vllm.v1.engine.core.EngineCore = Core
vllm.v1.core.sched.scheduler.Scheduler = Balance
kv_cache_utils.hashes = copied
envs.SWITCH = True
setattr(Scheduler, "finish", copied)


def patch(argument):
    output = outputs.ModelRunnerOutput
    output.empty = copied
    argument.schedule = copied


_manager = sys.modules.get("vllm.v1.core.kv_cache_manager")
if _manager is not None:
    _manager.coordinator = copied
_other = sys.modules.get("torch")
_other.compile = copied
unrelated.attribute = copied
"""


@dataclass
class Patches(DictTree):
    files: dict[str, str] = field(default_factory=lambda: {"other/patch/one.py": SOURCE, "other/x.py": SOURCE})


def test_each_assignment_is_read_with_what_stands_there() -> None:
    found = {(one.module, one.name): (one.kind, one.by) for one in rebindings(Patches(), "vllm", "other/patch/")}
    scheduler = "vllm.v1.core.sched.scheduler"
    assert found == {
        (scheduler, "Scheduler.schedule"): (Kind.WRAPPER, "schedule"),
        (scheduler, "Scheduler.add_request"): (Kind.COPY, "copied"),
        (scheduler, "Scheduler.finish"): (Kind.COPY, "copied"),
        ("vllm.v1.engine.core", "EngineCore"): (Kind.SUBCLASS, "Core"),
        (scheduler, "Scheduler"): (Kind.SUBCLASS, "Balance"),
        ("vllm.v1.core.kv_cache_utils", "hashes"): (Kind.COPY, "copied"),
        ("vllm.v1.outputs", "ModelRunnerOutput.empty"): (Kind.COPY, "copied"),
        ("vllm.v1.core.kv_cache_manager", "coordinator"): (Kind.COPY, "copied"),
        ("vllm.envs", "SWITCH"): (Kind.VALUE, ""),
    }


@pytest.mark.parametrize("release", ASCEND.reviewed())
def test_each_release_pairs_with_the_vllm_that_its_container_installs(release: str) -> None:
    dockerfile = open_sources(release, package=ASCEND.package).read("Dockerfile").decode()
    assert f"ARG VLLM_TAG=v{paired(release)}\n" in dockerfile


def test_a_release_whose_vllm_is_not_reviewed_is_refused() -> None:
    with pytest.raises(OverlayError, match=r"0.18.7rc1 pairs with vLLM 0.18.7, whose overlay has not been reviewed"):
        paired("0.18.7rc1")


@pytest.fixture(scope="module")
def known() -> Mapping[str, list[Fate]]:
    return {release: fates(release, ASCEND) for release in ASCEND.reviewed()}


def test_how_many_there_are(known: Mapping[str, list[Fate]]) -> None:
    counts = {release: len(of_release) for release, of_release in known.items()}
    assert counts == {
        "0.9.1": 16,
        "0.11.0": 23,
        "0.13.0": 37,
        "0.18.0": 97,
        "0.23.0": 201,
        "0.23.0.post1": 201,
        "0.30.0rc2": 208,
    }


def test_no_hook_is_lost_that_nothing_serves(known: Mapping[str, list[Fate]]) -> None:
    hooked = {release: [f for f in of_release if f.hooked] for release, of_release in known.items()}
    assert not [f for of_release in hooked.values() for f in of_release if not f.survives and "ascend." not in f.serves]
    (update,) = (f for f in hooked["0.13.0"] if not f.survives)
    assert update.rebinding.name == "GPUModelRunner._update_states"
    assert set(update.hooked) == {f"model_runner.{n}" for n in ("blocks-updated", "requests-finished", "update-states")}
    assert [f"ascend.update_states.{rule.rpartition('.')[2]}" for rule in update.hooked] == update.serves.split(", ")
