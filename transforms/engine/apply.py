"""Apply rules to a module, one pass per rule, and report the outcome of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from transforms.engine.candidates import nearest_definitions, nearest_statements, places
from transforms.engine.edits import Beside
from transforms.engine.flow import is_passed_by
from transforms.engine.marks import MARK
from transforms.engine.patterns import pattern
from transforms.engine.report import Outcome, Status
from transforms.engine.scope import Scope
from transforms.engine.tree import Path, get, replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import libcst as cst

    from transforms.engine.edits import Edit
    from transforms.engine.report import Candidate
    from transforms.engine.rule import Rule, Upstreamed, Variant


@dataclass(frozen=True)
class Attempt:
    """The result of trying one variant: the scopes searched and the anchors found."""

    variant: Variant
    scopes: tuple[Path, ...]
    hits: tuple[Path, ...]
    already: int

    def fits(self, expect: int) -> bool:
        """Whether it found one scope with the expected number of anchors, and none of its own insertions."""
        return len(self.scopes) == 1 and len(self.hits) == expect and not self.already


def apply_rules(module: cst.Module, rules: Sequence[Rule], path: str, release: str) -> tuple[cst.Module, list[Outcome]]:
    """Apply rules to a parsed module, each to the result of the one before.

    Args:
        module: The upstream module.
        rules: Applied in this order; a rule that fails leaves the module unchanged.
        path: The module's path, for the report.
        release: The release; it selects among several variants that fit, never whether a rule is tried.

    Returns:
        The rewritten module and one outcome per rule.
    """
    upstream, outcomes = module, []
    for rule in rules:
        module, outcome = apply_rule(module, rule, path, release)
        # Line numbers are those of the upstream file, not of the half-rewritten one.
        if outcome.candidates and module is not upstream:
            told = apply_rule(upstream, rule, path, release)[1]
            outcome = told if told.status is outcome.status else outcome
        outcomes.append(outcome)
    return module, outcomes


def apply_rule(module: cst.Module, rule: Rule, path: str, release: str) -> tuple[cst.Module, Outcome]:
    """Apply one rule to a parsed module; see `apply_rules`."""
    if rule.upstreamed and _has(module, rule.upstreamed, rule.id):
        return module, Outcome(rule.id, Status.UPSTREAMED, path, detail=rule.upstreamed.note)
    attempts = [_attempt(module, variant, rule) for variant in rule.variants]
    done = next((attempt for attempt in attempts if attempt.already == rule.expect), None)
    if done:
        return module, _outcome(rule, Status.PRESENT, path, done, "", ())
    fitting = [attempt for attempt in attempts if attempt.fits(rule.expect)]
    if len(fitting) > 1:
        fitting = [a for a in fitting if release in a.variant.releases] or fitting
    if len(fitting) != 1:
        return module, _failure(module, rule, path, release, attempts, fitting)
    refused = _refusal(module, rule, path, release, fitting[0])
    return (module, refused) if refused else _applied(module, rule, path, fitting[0])


def _attempt(module: cst.Module, variant: Variant, rule: Rule) -> Attempt:
    scopes = variant.scope.find(module)
    if len(scopes) != 1:
        return Attempt(variant, tuple(scopes), (), 0)
    scope = get(module, scopes[0])
    return Attempt(variant, tuple(scopes), tuple(variant.edit.find(scope)), variant.edit.applied(scope, rule.id))


def attachments(module: cst.Module, rule: Rule, variant: str) -> list[tuple[Path, str]]:
    """Return where a rule's applied variant attaches: each node's path, and the side or kind of insertion."""
    form = next(form for form in rule.variants if form.name == variant)
    return [
        _attachment(form.edit, get(module, scope), scope, hit)
        for scope in form.scope.find(module)
        for hit in form.edit.find(get(module, scope))
    ]


def _attachment(edit: Edit, node: cst.CSTNode, scope: Path, hit: Path) -> tuple[Path, str]:
    if isinstance(edit, Beside):
        return (*scope, *edit.statement(node, hit)), edit.side
    return (*scope, *hit), type(edit).__name__


def _refusal(module: cst.Module, rule: Rule, path: str, release: str, attempt: Attempt) -> Outcome | None:
    """Return the failure that forbids applying a rule whose anchor was found, or None."""
    scope, edit = get(module, attempt.scopes[0]), attempt.variant.edit
    for text in rule.never:
        hits = [(*attempt.scopes[0], *hit) for hit in pattern(text).find(scope)]
        if hits:
            detail = f"`{text}` occurs here, and must not"
            return _outcome(rule, Status.FORBIDDEN, path, attempt, detail, places(module, hits))
    for hit in attempt.hits:
        obstacle = edit.obstacle(scope, hit)
        if not obstacle and is_passed_by(module, (*attempt.scopes[0], *hit)):
            obstacle = "control never reaches it"
        if obstacle:
            detail = f"nothing can be inserted at `{edit.anchor}`: {obstacle}"
            return _absent(rule, path, release) or _outcome(
                rule, Status.MISSING, path, attempt, detail, places(module, [(*attempt.scopes[0], *hit)])
            )
    return None


def _applied(module: cst.Module, rule: Rule, path: str, attempt: Attempt) -> tuple[cst.Module, Outcome]:
    variant, scope_path = attempt.variant, attempt.scopes[0]
    scope = get(module, scope_path)
    for hit in reversed(attempt.hits):  # backwards, so that the remaining paths stay valid
        scope = variant.edit.apply(scope, hit, rule.id)
    changed = cast("cst.Module", replace(module, scope_path, scope))
    return changed, _outcome(rule, Status.APPLIED, path, attempt, "", ())


def _failure(
    module: cst.Module, rule: Rule, path: str, release: str, attempts: list[Attempt], fitting: list[Attempt]
) -> Outcome:
    if len(fitting) > 1:
        names = ", ".join(a.variant.name for a in fitting)
        hits = [(*a.scopes[0], *hit) for a in fitting for hit in a.hits]
        detail = f"{len(fitting)} variants match ({names}); exactly one must"
        return Outcome(rule.id, Status.AMBIGUOUS, path, detail=detail, candidates=places(module, hits))
    best = max(attempts, key=lambda a: (release in a.variant.releases, len(a.scopes) == 1, len(a.hits)))
    if len(best.scopes) > 1:
        detail = f"{len(best.scopes)} places match the scope {best.variant.scope}; exactly one must"
        return _outcome(rule, Status.AMBIGUOUS, path, best, detail, places(module, list(best.scopes)))
    if best.already:
        detail = f"its insertion is already here {best.already} times; {rule.expect} expected"
        return _outcome(rule, Status.AMBIGUOUS, path, best, detail, places(module, list(best.scopes)))
    if len(best.hits) > rule.expect:
        hits = [(*best.scopes[0], *hit) for hit in best.hits]
        detail = f"`{best.variant.edit.anchor}` matches {len(hits)} times; {rule.expect} expected"
        return _outcome(rule, Status.AMBIGUOUS, path, best, detail, places(module, hits))
    absent = _absent(rule, path, release)
    if absent:
        return absent
    if not best.scopes:
        name = best.variant.scope.name
        detail = f"there is no {best.variant.scope}"
        status = Status.MISSING if Scope(name.partition(".")[0]).find(module) else Status.ENDED
        return _outcome(rule, status, path, best, detail, nearest_definitions(module, name))
    detail = f"`{best.variant.edit.anchor}` matches {len(best.hits)} times; {rule.expect} expected"
    near = nearest_statements(module, best.scopes[0], best.variant.edit.anchor)
    return _outcome(rule, Status.MISSING, path, best, detail, near)


def _absent(rule: Rule, path: str, release: str) -> Outcome | None:
    reason = rule.absence(release)
    return Outcome(rule.id, Status.NOT_APPLICABLE, path, detail=reason) if reason else None


def _outcome(
    rule: Rule, status: Status, path: str, attempt: Attempt, detail: str, candidates: tuple[Candidate, ...]
) -> Outcome:
    scope, name = str(attempt.variant.scope), attempt.variant.name
    hits = attempt.already or len(attempt.hits)
    return Outcome(rule.id, status, path, scope, name, hits, detail, candidates)


def _has(module: cst.Module, sign: Upstreamed, rule: str) -> bool:
    scopes = sign.scope.find(module)
    if not sign.anchor:
        return bool(scopes) and not any(MARK + rule in module.code_for_node(get(module, s)) for s in scopes)
    return any(pattern(sign.anchor).find(get(module, scope)) for scope in scopes)
