"""A made-up third-party project whose registry changes the miniature vLLM, and a made-up package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transforms.engine.cases import Case
from transforms.engine.edits import AtStart, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.registry import Package, Registry
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Seam, Transform
from transforms.registry import VLLM

if TYPE_CHECKING:
    from pathlib import Path

SEAM = Seam("acme_seam.hooks")
#: The source of hooks that record their calls.
HOOKS = "CALLS = []\n\ndef told(what):\n    CALLS.append(what)\n"
WORDS = "a reason that a reviewer is able to check"
RECORD = Governance(WORDS, WORDS, (Process.ENGINE_CORE,), Upstream(UpstreamStatus.NOT_SUBMITTED, WORDS), WORDS)

FREED = rule("acme.lives.freed", Scope("Scheduler._free_request"), AtStart("_acme_seam_hooks.told('freed')"))
ADDED = rule(
    "acme.lives.added",
    Scope("Scheduler.add_request"),
    after("self.waiting.append(request)", "_acme_seam_hooks.told('added')"),
)


def write_seam(place: Path) -> Path:
    """Write the seam's package to a directory; return the path of its hooks."""
    (place / "acme_seam").mkdir(parents=True, exist_ok=True)
    (place / "acme_seam" / "__init__.py").touch()
    hooks = place / "acme_seam" / "hooks.py"
    hooks.write_text(HOOKS, encoding="utf-8")
    return hooks


def _method(name: str, *body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body)
    return f"class Scheduler:\n    def {name}(self, request):\n{lines}"


def of_vllm(place: Path, group: str = "acme") -> Registry:
    """Return a registry of vLLM that shares the scheduler with UCM's.

    Args:
        place: The directory of its seam and its locks.
        group: The group that switches its hooks off.
    """
    scheduler = Transform(
        "acme.lives",
        Module("lives", group, (ModulePath("vllm/v1/core/sched/scheduler.py"),)),
        RECORD,
        (FREED, ADDED),
        (
            Case(
                FREED.id,
                _method("_free_request", "return None"),
                _method("_free_request", "_acme_seam_hooks.told('freed')  # ucm: acme.lives.freed", "return None"),
                "0.32.0",
            ),
            Case(
                ADDED.id,
                _method("add_request", "self.waiting.append(request)"),
                _method(
                    "add_request",
                    "self.waiting.append(request)",
                    "_acme_seam_hooks.told('added')  # ucm: acme.lives.added",
                ),
                "0.32.0",
            ),
        ),
        not_counted=WORDS,
        seam=SEAM,
    )
    return Registry(
        "acme", "Acme", VLLM, (scheduler,), write_seam(place), place / "overlays", "acme-vllm-overlay", ("acme-seam",)
    )


#: The registry file of a project outside this repository, for a package that this repository does not know.
REGISTRY_SOURCE = '''\
"""The registry of the rocket project."""

from pathlib import Path

from transforms.engine.cases import Case
from transforms.engine.edits import AtEnd
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.registry import Package, Registry
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Seam, Transform

HERE = Path(__file__).parents[1]
WORDS = "a reason that a reviewer is able to check"
LAUNCH = "class Rocket:\\n    def launch(self):\\n        self.up = True\\n"

REGISTRY = Registry(
    "rocket",
    "Rocket",
    Package("rocket", "rocket", "Rocket", "nobody at all"),
    (
        Transform(
            "rocket.launch",
            Module("launch", "rocket", (ModulePath("rocket/engine.py"),), reads_beside=True),
            Governance(WORDS, WORDS, (Process.MAIN,), Upstream(UpstreamStatus.NOT_SUBMITTED, WORDS), WORDS),
            (rule("rocket.launch.told", Scope("Rocket.launch"), AtEnd("_acme_seam_hooks.told(self)")),),
            (
                Case(
                    "rocket.launch.told",
                    LAUNCH,
                    LAUNCH + "        _acme_seam_hooks.told(self)  # ucm: rocket.launch.told\\n",
                    "1.0",
                ),
            ),
            not_counted=WORDS,
            seam=Seam("acme_seam.hooks"),
        ),
    ),
    hooks=HERE / "acme_seam" / "hooks.py",
    overlays=HERE / "overlays",
    distribution="rocket-overlay",
)
'''
#: The source of a module that reads a file next to itself.
ROCKET = """\
import os

with open(os.path.join(os.path.dirname(__file__), "fuel.txt"), encoding="utf-8") as fuel:
    FUEL = fuel.read()


class Rocket:
    def launch(self):
        self.up = True
"""


def write_project(place: Path) -> Path:
    """Write a minimal installed project for another package: a registry, a seam and an entry point."""
    write_seam(place)
    (place / "rocket_rules").mkdir()
    (place / "rocket_rules" / "__init__.py").write_text(REGISTRY_SOURCE, encoding="utf-8")
    about = place / "rocket_rules-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rocket-rules\nVersion: 1\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[ucm.transforms]\nrocket = rocket_rules:REGISTRY\n", encoding="utf-8")
    return place


def write_rocket(place: Path) -> Path:
    """Write the package that the project changes."""
    (place / "rocket").mkdir(parents=True)
    (place / "rocket" / "__init__.py").touch()
    (place / "rocket" / "engine.py").write_text(ROCKET, encoding="utf-8")
    (place / "rocket" / "fuel.txt").write_text("kerosene", encoding="utf-8")
    return place


__all__ = ["Package", "of_vllm", "write_project", "write_rocket", "write_seam"]
