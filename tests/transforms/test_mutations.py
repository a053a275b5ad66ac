"""Real modules, rewritten twice and with changes that a new release might make: harmless ones, and ones that must fail.

The modules are those of `forms`: together, they have every variant of every rule.
"""

from __future__ import annotations

import ast
import functools
import random
from collections import Counter
from typing import TYPE_CHECKING

import libcst as cst
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.transforms.mutations import HARMFUL, HARMLESS, mutated, sites
from tests.transforms.upstream import forms, package_of, parsed, sources
from transforms.engine import apply
from transforms.engine.apply import apply_rule, apply_rules
from transforms.engine.report import Candidate, Status
from transforms.engine.splice import spliced
from transforms.registry import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.transforms.mutations import Site
    from transforms.engine.report import Outcome
    from transforms.engine.transform import Transform
    from transforms.engine.tree import Path

HOOKS = "_ucm_hooks"
#: One example and no shrinking, because it takes half a second; `nox -s fuzz` tries many more.
PROFILE = settings(
    deadline=None, max_examples=1, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
#: The scope makes pytest run the tests of one module one after the other, so that they share its tree.
each_form = pytest.mark.parametrize(
    ("release", "transform"),
    [pytest.param(release, transform, id=f"{release}-{transform.id}") for release, transform in forms()],
    scope="module",
)


@functools.lru_cache(maxsize=1)
def module_of(release: str, transform: Transform) -> tuple[str, cst.Module]:
    found = parsed(transform, release)
    assert found is not None
    return found


@functools.lru_cache(maxsize=1)
def places_of(release: str, transform: Transform) -> tuple[list[Site], list[Path]]:
    """Return all places of a module, and the regions that the rules search."""
    _, module = module_of(release, transform)
    scopes = [path for rule in transform.rules for variant in rule.variants for path in variant.scope.find(module)]
    return sites(module), scopes


@functools.lru_cache(maxsize=1)
def result_of(release: str, transform: Transform) -> tuple[cst.Module, list[Outcome], Counter[str]]:
    """Return the rewritten module, the outcomes of the rules on the published one, and their insertions."""
    path, module = module_of(release, transform)
    changed, outcomes = apply_rules(module, transform.all_rules, path, release)
    code = printed(release, transform, changed)
    assert code == changed.bytes
    return changed, outcomes, inserted(code)


def printed(release: str, transform: Transform, changed: cst.Module) -> bytes:
    """Return the code of a changed module; to print it as a whole takes ten times as long."""
    path, module = module_of(release, transform)
    return spliced(sources(release, package_of(transform)).read(path), module, changed) or changed.bytes


def inserted(code: bytes) -> Counter[str]:
    """Compile code, and return the statements that name UCM, each with its enclosing definitions and blocks."""
    tree = ast.parse(code)
    compile(tree, "m.py", "exec", dont_inherit=True)
    return Counter(f"{place}: {ast.unparse(node)}" for place, node in _insertions(tree, ""))


def _insertions(node: ast.AST, place: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{place}/{child.name}"
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.keyword):
            inside = f"{place}/{type(child).__name__}"
        if _is_insertion(child):
            yield inside, child
        yield from _insertions(child, inside)


def _is_insertion(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id.startswith("ucm_")
    if isinstance(node, ast.ImportFrom):
        return any(alias.asname == HOOKS for alias in node.names)
    hook = node.func if isinstance(node, ast.Call) else node
    return isinstance(hook, ast.Attribute) and isinstance(hook.value, ast.Name) and hook.value.id == HOOKS


@each_form
def test_a_second_run_recognises_the_insertions_of_the_first(release: str, transform: Transform) -> None:
    path, _ = module_of(release, transform)
    changed, outcomes, _ = result_of(release, transform)
    again, repeated = apply_rules(changed, transform.all_rules, path, release)
    assert again is changed
    second = {Status.APPLIED: Status.PRESENT}
    assert [o.status for o in repeated] == [second.get(o.status, o.status) for o in outcomes]


@each_form
@settings(PROFILE)
@given(seed=st.integers(0, 2**32))
def test_harmless_changes_change_nothing_for_the_rules(release: str, transform: Transform, seed: int) -> None:
    """Hypothesis tries the same seeds for each module, and each module has other kinds of changes for a seed."""
    chance = random.Random(f"{seed} {release} {transform.id}")  # noqa: S311 - no secret
    kinds = chance.sample(sorted(HARMLESS), chance.randint(3, len(HARMLESS)))
    path, module = module_of(release, transform)
    places, scopes = places_of(release, transform)
    _, outcomes, wanted = result_of(release, transform)
    code = printed(release, transform, mutated(module, places, scopes, kinds, seed))
    again = cst.parse_module(code)
    changed, found = apply_rules(again, transform.all_rules, path, release)
    assert found == outcomes
    assert inserted(spliced(code, again, changed) or changed.bytes) == wanted


@each_form
def test_harmful_changes_are_never_applied_over(
    release: str, transform: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> tuple[Candidate, ...]:
        return ()

    for name in ("places", "nearest_statements", "nearest_definitions"):  # slow, and tested elsewhere
        monkeypatch.setattr(apply, name, none)
    path, module = module_of(release, transform)
    for rule in transform.rules:
        if apply_rule(module, rule, path, release)[1].status is not Status.APPLIED:
            continue
        for name, change in HARMFUL.items():
            harmed = change(module, rule, release)
            result, outcome = apply_rule(harmed, rule, path, release)
            assert outcome.status.failed, f"{name}: {outcome.describe()}"
            assert result is harmed


@pytest.mark.parametrize("kind", sorted(HARMLESS))
def test_each_harmless_kind_changes_something(kind: str) -> None:
    transform = next(t for t in TRANSFORMS if t.id == "scheduler")
    path, module = module_of("0.33.0", transform)
    places, scopes = places_of("0.33.0", transform)
    changed = printed("0.33.0", transform, mutated(module, places, scopes, [kind], 0))
    assert changed != sources("0.33.0").read(path)
