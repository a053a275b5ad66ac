"""Transforms: the rules for one module, their governance record, and a before/after case of each rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transforms.engine.edits import AtStart
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.governance import QUESTIONS, check_reason
from transforms.engine.rule import rule
from transforms.engine.scope import Scope

if TYPE_CHECKING:
    from transforms.engine.cases import Case
    from transforms.engine.census import Census
    from transforms.engine.governance import Governance
    from transforms.engine.rule import Module, Rule


@dataclass(frozen=True)
class Seam:
    """The module whose functions inserted code calls; inserted code imports no other.

    Attributes:
        module: Its dotted name.
    """

    module: str

    @property
    def alias(self) -> str:
        """Its name in a rewritten module."""
        return f"_{self.module.partition('.')[0]}_hooks"

    @property
    def statement(self) -> str:
        """The import statement that is inserted into a rewritten module."""
        package, _, name = self.module.rpartition(".")
        return f"from {package} import {name} as {self.alias}"


#: The default seam.
DEFAULT_SEAM = Seam("ucm.integration.vllm.hooks")


@dataclass(frozen=True)
class EngineTest:
    """A test on a real engine, which fails if rules insert nothing.

    Attributes:
        test: Its file and function, as pytest names them: ``tests/test_it.py::test_that``.
        rules: The rules that it covers; empty: those of the transform that no other entry names.
    """

    test: str
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transform:
    """The changes to one vLLM module.

    Attributes:
        id: The area's name; the ids of its rules start with it.
        module: The module that they change.
        governance: Its governance record.
        rules: In order of application; `all_rules` adds the import of the hooks.
        cases: At least one per rule: its unit tests.
        needs: Other groups of modules that must be rewritten for the inserted calls to work.
        opt_in: Ids of the rules that no shipped feature uses, or the transform's id for all of its rules. Only builds
            with ``--hooks all`` insert them.
        census: Searches for all code in the package of the kinds that the rules hook.
        not_counted: Why some rules have no census; empty if all have one.
        seam: The module that the inserted calls call.
        engine_tests: The tests on engines that fail if a rule inserts nothing.
        not_run: Why no test runs the rules on an engine; empty if one does.
    """

    id: str
    module: Module
    governance: Governance
    rules: tuple[Rule, ...]
    cases: tuple[Case, ...]
    needs: tuple[str, ...] = ()
    opt_in: tuple[str, ...] = ()
    census: tuple[Census, ...] = ()
    not_counted: str = ""
    seam: Seam = DEFAULT_SEAM
    engine_tests: tuple[EngineTest, ...] = ()
    not_run: str = ""

    def __post_init__(self) -> None:
        self.governance.check(self.id, shown=all(r.upstreamed for r in self.rules))
        if bool(self.census) == bool(self.not_counted):
            raise RuleDefinitionError(
                "a transform has both or neither of `census` and `not_counted`",
                where=f"transform {self.id}",
                fix="search the package for places of the kinds that the rules hook, or say why there can be no others",
            )
        if self.not_counted:
            check_reason(self.not_counted, "`not_counted`", f"transform {self.id}")
        if self.not_run:
            check_reason(self.not_run, "`not_run`", f"transform {self.id}")
        tested = [rule for entry in self.engine_tests for rule in entry.rules]
        twice = [i for i, n in Counter(r.id for r in self.rules).items() if n > 1]
        strangers = [r.id for r in self.rules if not r.id.startswith(f"{self.id}.")]
        rules, cases = {r.id for r in self.rules}, {case.rule for case in self.cases}
        counted = {c.id for c in self.census}
        problems = {
            "a rule's id is used twice": twice,
            "a rule's id does not start with the transform's": strangers,
            "a rule has no case": sorted(rules - cases),
            "a case names no rule of its transform": sorted(cases - rules),
            "no rule of its transform is opt-in under this id": sorted(set(self.opt_in) - rules - {self.id}),
            "an engine test names no rule of its transform": sorted(set(tested) - rules),
            "an engine test and the reason for none are given": [self.id] if self.engine_tests and self.not_run else [],
            "a census' id does not start with the transform's": [c for c in counted if not c.startswith(f"{self.id}.")],
        }
        for problem, ids in problems.items():
            if ids:
                raise RuleDefinitionError(problem, where=f"{self.id}: {', '.join(ids)}")

    @property
    def unanswered(self) -> list[str]:
        """The fields of its record that repeat their question instead of answering it."""
        texts = {**self.governance.texts, "not_counted": self.not_counted}
        return [field for field, text in texts.items() if QUESTIONS[field] in text]

    @property
    def default(self) -> Transform | None:
        """The transform without opt-in rules; None if nothing is left."""
        if not self.opt_in:
            return self
        rules = tuple(rule for rule in self.rules if not self.is_opt_in(rule.id))
        cases = tuple(case for case in self.cases if not self.is_opt_in(case.rule))
        return replace(self, rules=rules, cases=cases, opt_in=(), engine_tests=()) if rules else None

    def engine_test(self, rule_id: str) -> str:
        """Return the test on an engine that fails if a rule inserts nothing; empty if there is none."""
        tests = [entry.test for entry in self.engine_tests if rule_id in entry.rules]
        return next(iter([*tests, *(entry.test for entry in self.engine_tests if not entry.rules)]), "")

    def is_opt_in(self, rule_id: str) -> bool:
        """Return whether only builds with ``--hooks all`` insert a rule."""
        return rule_id in self.opt_in or self.id in self.opt_in

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules, preceded by the import of the hooks if any rule calls one."""
        if not any(self.seam.alias in variant.edit.code for rule in self.rules for variant in rule.variants):
            return self.rules
        return (rule(f"{self.id}.import", Scope(), AtStart(self.seam.statement)), *self.rules)
