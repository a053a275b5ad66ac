"""Replacements of vLLM's functions by another package: how they are found, and what they do to the hooks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from tests.transforms.pipeline.memory import DictTree
from transforms.ascend.registry import REGISTRY
from transforms.engine.errors import OverlayError
from transforms.pipeline.build import check_complete
from transforms.pipeline.generate import PAGES
from transforms.pipeline.product import compose
from transforms.pipeline.rebindings import Kind, LostHooksError, fates, paired, rebindings
from transforms.pipeline.rewrite import Overlay
from transforms.pipeline.sources.open import open_sources

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


def test_other_forms_of_assignments_are_read() -> None:
    source = """\
from vllm.v1.core.sched.scheduler import Scheduler
def one(self): ...
def two(self): ...
Scheduler.schedule, Scheduler.finish = one, two
[Scheduler.add_request, _] = both()
Scheduler.update: object = one
Scheduler.declared: object
"""
    found = {
        one.name: one.by for one in rebindings(Patches(files={"other/patch/one.py": source}), "vllm", "other/patch/")
    }
    assert found == {
        "Scheduler.schedule": "one",
        "Scheduler.finish": "two",
        "Scheduler.add_request": "both",
        "Scheduler.update": "one",
    }


BEFORE = """\
import sys
from vllm.v1.core.sched.scheduler import Scheduler
import vllm_ascend.other as other
_schedule = Scheduler.schedule
def one(self): ...
"""
SCHEDULE = {"scheduler.running-tokens", "scheduler.waiting-tokens", "scheduler.output"}
FREED = {"scheduler.freed"}


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        ('sys.modules["vllm.v1.core.sched.scheduler"] = other', SCHEDULE | FREED),
        ('PLACE = "vllm.v1.core.sched.scheduler"\nsys.modules[PLACE] = other', SCHEDULE | FREED),
        ('sys.modules.update({"vllm.v1.core.sched.scheduler": other})', SCHEDULE | FREED),
        ('sys.modules["torch.cuda"] = other', set()),
        ("setattr(Scheduler, computed(), one)", SCHEDULE | FREED),
        ("for name, new in found:\n    setattr(Scheduler, name, new)", SCHEDULE | FREED),
        ('NAME = "schedule"\nsetattr(Scheduler, NAME, one)', SCHEDULE),
        ('for name in ("schedule", "close"):\n    setattr(Scheduler, name, one)', SCHEDULE),
        ('type.__setattr__(Scheduler, "schedule", one)', SCHEDULE),
        ('MARK = "patched"\nsetattr(Scheduler, MARK, True)', set()),
        ("def new(self):\n    return log(_schedule)\nScheduler.schedule = new", SCHEDULE),
        ("import functools\n@functools.wraps(_schedule)\ndef new(self): ...\nScheduler.schedule = new", SCHEDULE),
        ("def new(self):\n    own = _schedule\n    return own(self)\nScheduler.schedule = new", set()),
    ],
)
def test_what_an_assignment_takes_away(code: str, lost: set[str]) -> None:
    tree = Patches(files={f"{ASCEND.package.rebinds}x.py": f"{BEFORE}{code}\n"})
    found = {rule for fate in fates(ASCEND.reviewed()[-1], ASCEND, {}, tree) for rule in fate.lost}
    assert found & (SCHEDULE | FREED) == lost


def test_a_subclass_of_a_subclass_inherits_what_that_replaces() -> None:
    base = "from vllm.v1.core.sched.scheduler import Scheduler\nclass Base(Scheduler):\n    def schedule(self): ...\n"
    tree = Patches(
        files={
            "vllm_ascend/patch/base.py": base,
            "vllm_ascend/patch/x.py": "import vllm.v1.core.sched.scheduler as module\n"
            "from vllm_ascend.patch.base import Base\nclass New(Base):\n    def close(self): ...\n"
            "module.Scheduler = New\n",
        }
    )
    release = ASCEND.reviewed()[-1]
    (fate,) = fates(release, ASCEND, {}, tree)
    assert (fate.rebinding.kind, set(fate.lost)) == (Kind.SUBCLASS, SCHEDULE)
    hooked = {("vllm_ascend/patch/base.py", "Base.schedule"): dict.fromkeys(SCHEDULE, 1)}
    (fate,) = fates(release, ASCEND, hooked, tree)
    assert (fate.survives, fate.lost) == (True, ())


def test_a_build_refuses_an_overlay_that_loses_hooks() -> None:
    """As accepting does: a lock may be older than the check."""
    release = ASCEND.reviewed()[-1]
    code = f"{BEFORE}Scheduler.schedule = one\n"
    tree = Patches(release, files={f"{ASCEND.package.rebinds}x.py": code})
    overlay = Overlay(release, tree.artefact, (), (), ASCEND)
    with pytest.raises(LostHooksError, match=r"Scheduler\.schedule = one, which has nothing in place of"):
        check_complete(overlay, {}, tree)


def test_an_overlay_without_hooks_and_sources_at_hand_are_judged_themselves() -> None:
    """Not what the lock and the package index have of the same release."""
    source = "from vllm.v1.core.sched.scheduler import Scheduler\ndef one(self): ...\nScheduler.schedule = one\n"
    release = ASCEND.reviewed()[-1]
    (fate,) = fates(release, ASCEND, {}, Patches(files={f"{ASCEND.package.rebinds}x.py": source}))
    assert fate.lost == fate.hooked != ()


@pytest.mark.parametrize("release", ASCEND.reviewed())
def test_each_release_pairs_with_the_vllm_that_its_container_installs(release: str) -> None:
    dockerfile = open_sources(release, package=ASCEND.package).read("Dockerfile").decode()
    assert f"ARG VLLM_TAG=v{paired(release)}\n" in dockerfile


def test_a_release_whose_vllm_is_not_reviewed_is_refused() -> None:
    with pytest.raises(OverlayError, match=r"0.18.7rc1 pairs with vLLM 0.18.7, whose overlay has not been reviewed"):
        paired("0.18.7rc1")


def test_no_hook_is_lost_that_nothing_serves() -> None:
    """The page says so, which `test_generate.py` compares with what is made of the sources and the locks."""
    page = (PAGES / "ascend_rebindings.md").read_text(encoding="utf-8")
    lost = re.findall(r"^\| \[([\w.]+)\].* \| (\d+) \|$", page, re.MULTILINE)
    assert dict(lost) == dict.fromkeys(ASCEND.reviewed(), "0")
    (update,) = (fate for fate in fates("0.13.0", ASCEND) if fate.hooked and not fate.survives)
    assert update.rebinding.name == "GPUModelRunner._update_states"
    assert set(update.hooked) == {f"model_runner.{n}" for n in ("blocks-updated", "requests-finished", "update-states")}
    assert [f"ascend.update_states.{rule.rpartition('.')[2]}" for rule in update.hooked] == update.serves.split(", ")
