"""Try the cases of every owner of a product, and read their records: the rules of somebody else's package like our own.

Each rule makes of its case what the case shows, with hooks that exist, and each record answers its questions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.apply import apply_rule
from transforms.engine.errors import OverlayError
from transforms.engine.governance import QUESTIONS
from transforms.engine.report import Status
from transforms.pipeline.checks import check_hook_uses, hook_signatures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.cases import Case
    from transforms.engine.registry import Registry
    from transforms.engine.rule import Rule
    from transforms.pipeline.product import Product


class CaseError(OverlayError):
    """Cases do not hold."""


class RecordError(OverlayError):
    """Records repeat their questions instead of answering them."""


def check_answered(product: Product) -> None:
    """Refuse the record of a skeleton that nobody has written.

    Raises:
        RecordError: Naming each text's place, its rules, and what to write there.
    """
    asked = [
        f"{_place(product.owner_of(transform.id), QUESTIONS[field])}: `{field}` of {transform.id} "
        f"({', '.join(rule.id for rule in transform.rules)}): write {QUESTIONS[field]}"
        for transform in product.transforms
        for field in transform.unanswered
    ]
    if asked:
        raise RecordError(
            f"{len(asked)} texts of the record repeat their questions:\n    " + "\n    ".join(asked),
            fix="write the answers there, so that a reviewer can judge the change",
        )


def _place(owner: Registry, text: str) -> str:
    """Return where an owner's rules first have a text: the file and the line; else the owner."""
    for file in sorted(owner.hooks.parent.rglob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines()
        if at := next((number for number, line in enumerate(lines, 1) if text in line), 0):
            return f"{file}:{at}"
    return f"the rules of {owner.title}"


def check_cases(product: Product) -> None:
    """Check every case of a product.

    Raises:
        CaseError: Naming each case that does not hold, and why.
    """
    wrong = list(_wrong(product))
    if wrong:
        raise CaseError(
            f"{len(wrong)} cases do not hold:\n    " + "\n    ".join(wrong),
            fix="correct the case or its rule: a case is the least code in which the rule finds its anchor",
        )


def _wrong(product: Product) -> Iterator[str]:
    signatures = {one.seam: hook_signatures(one.hooks) for one in product.registries}
    for transform in product.transforms:
        rules = {rule.id: rule for rule in transform.rules}
        for case in transform.cases:
            problem = why_not(rules[case.rule], case) or check_hook_uses(case.after.encode(), signatures)
            if problem:
                yield f"{case.rule} in {case.release}: {problem}"


def why_not(rule: Rule, case: Case) -> str:
    """Return why a case does not hold; empty if it does."""
    try:
        changed, outcome = apply_rule(cst.parse_module(case.before), rule, "the case", case.release)
    except cst.ParserSyntaxError as error:
        return f"it does not parse: {error.message} (line {error.raw_line})"
    if outcome.status is not Status.APPLIED:
        return f"{outcome.status.value}: {outcome.detail}"
    return "" if changed.code == case.after else "the rule inserts something else, or elsewhere"
