"""Try the cases of every owner of a product: each rule makes of its case what the case shows, with hooks that exist.

The rules of a package that somebody else maintains are tried like this repository's own, before anything is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.apply import apply_rule
from transforms.engine.errors import OverlayError
from transforms.engine.report import Status
from transforms.pipeline.checks import check_hook_uses, hook_signatures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.cases import Case
    from transforms.engine.rule import Rule
    from transforms.pipeline.product import Product


class CaseError(OverlayError):
    """Cases do not hold."""


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
