"""A transform: the rules for one vLLM module, their record, and cases that show each of them at work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transforms.engine.edits import AtStart
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.rule import rule
from transforms.engine.scope import Scope

if TYPE_CHECKING:
    from transforms.engine.governance import Governance
    from transforms.engine.rule import Module, Rule

#: The one import that a rewritten module gains.
HOOKS_IMPORT = "from ucm.integration.vllm import hooks as _ucm_hooks"


@dataclass(frozen=True)
class Case:
    """A piece of code before and after one rule, in our own words.

    Attributes:
        rule: The rule's id.
        before: The code that the rule is given.
        after: What it makes of it.
        release: The release that the code stands for; it matters where variants differ.
    """

    rule: str
    before: str
    after: str
    release: str


@dataclass(frozen=True)
class Transform:
    """The changes to one vLLM module.

    Attributes:
        id: The area's name; the ids of its rules start with it.
        module: The module that they change.
        governance: Why, how, where, and until when.
        rules: In the order in which they are applied; the import of the hooks comes first by itself.
        cases: At least one per rule.
        needs: Groups whose rewritten modules this one's calls rely on.
    """

    id: str
    module: Module
    governance: Governance
    rules: tuple[Rule, ...]
    cases: tuple[Case, ...]
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.governance.check(self.id)
        twice = [i for i, n in Counter(r.id for r in self.rules).items() if n > 1]
        strangers = [r.id for r in self.rules if not r.id.startswith(f"{self.id}.")]
        rules, cases = {r.id for r in self.rules}, {case.rule for case in self.cases}
        problems = {
            "a rule's id is used twice": twice,
            "a rule's id does not start with the transform's": strangers,
            "a rule has no case": sorted(rules - cases),
            "a case names no rule of its transform": sorted(cases - rules),
        }
        for problem, ids in problems.items():
            if ids:
                raise RuleDefinitionError(problem, where=f"{self.id}: {', '.join(ids)}")

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules, and before them the import of the hooks where any of them calls one."""
        if not any("_ucm_hooks" in variant.edit.code for rule in self.rules for variant in rule.variants):
            return self.rules
        return (rule(f"{self.id}.import", Scope(), AtStart(HOOKS_IMPORT)), *self.rules)
