"""Rules whose insertion does nothing, one at a time: the tests that a rule names must fail: `python -m tests.mutants`.

A mutant inserts `pass` in place of a call, None in place of a keyword's value, or a method that does nothing. By
default, each rule of the newest reviewed release of each package is tried with its unit tests: its case of the form
that this release has, and, for vLLM Ascend, the run of the function that it changes (`test_ascend_modules.py`).
With `--engines`, the end-to-end test that it names runs instead. All engines have one overlay, in which each rule
inserts nothing in the processes whose environment names it: only an engine starts anew for each mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import libcst as cst
import pytest

from transforms.engine.apply import apply_rule
from transforms.engine.edits import AtEnd, AtStart, Beside
from transforms.engine.members import Field, Keyword, Method
from transforms.pipeline import build, lock
from transforms.pipeline.lock import make_lock, read_lock
from transforms.pipeline.product import parse, products
from transforms.pipeline.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transforms.engine.edits import Edit
    from transforms.engine.rule import Rule
    from transforms.engine.transform import Transform
    from transforms.pipeline.lock import Lock
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay

ROOT = Path(__file__).parents[1]
CASES = "tests/transforms/test_cases.py::test_before_becomes_after"
DRIVEN = "tests/transforms/test_ascend_modules.py::test_what_is_changed_runs_and_calls_its_hooks"
#: The variable that names the rule that inserts nothing in an engine. Those of UCM's own do not reach one.
MUTANT = "RULE_THAT_INSERTS_NOTHING"
#: The same for rules whose insertion runs when vLLM is imported, which most engines of the tests share.
EARLY_MUTANT = f"{MUTANT}_AT_IMPORT"


@dataclass(frozen=True)
class Mutant:
    """One rule that inserts nothing, in one release.

    Attributes:
        transform: Its transform.
        rule: The rule.
        product: Its product.
        release: The release.
        tests: The unit tests that must fail.
    """

    transform: Transform
    rule: Rule
    product: Product
    release: str
    tests: tuple[str, ...]


def harmless(edit: Edit) -> Edit:
    """Return an edit that inserts nothing in the same place."""
    if isinstance(edit, Keyword):
        return replace(edit, value="None")
    if isinstance(edit, Method):
        return replace(edit, code=edit.code.partition("\n")[0] + "\n    pass\n")
    if isinstance(edit, Beside | AtStart | AtEnd | Field):
        return replace(edit, code="pass")
    raise TypeError(edit)


def variable(edit: Edit) -> str:
    """Return the variable that switches an edit's insertion off."""
    return EARLY_MUTANT if isinstance(edit, Field) else MUTANT


def switchable(edit: Edit, rule: str) -> Edit:
    """Return an edit whose insertion does nothing in a process with the variable that names its rule."""
    wanted = f'__import__("os").environ.get({variable(edit)!r}) != {rule!r}'
    if isinstance(edit, Keyword):
        return replace(edit, value=f"({edit.value}) if {wanted} else None")
    if isinstance(edit, Method):
        head, _, body = edit.code.partition("\n")
        return replace(edit, code=f"{head}\n    if {wanted}:\n{textwrap.indent(body, '    ')}")
    if isinstance(edit, Beside | AtStart | AtEnd | Field):
        return replace(edit, code=f"if {wanted}:\n{textwrap.indent(edit.code, '    ')}")
    raise TypeError(edit)


def _change(rule: Rule, change: Callable[[Edit], Edit]) -> None:
    """Change the edit of each form of a rule, which is frozen."""
    object.__setattr__(rule, "variants", tuple(replace(form, edit=change(form.edit)) for form in rule.variants))


@contextlib.contextmanager
def mutated(rule: Rule) -> Iterator[None]:
    """Make a rule insert nothing, in all of its forms."""
    own = rule.variants
    _change(rule, harmless)
    try:
        yield
    finally:
        object.__setattr__(rule, "variants", own)


def mutants(product: Product, release: str) -> Iterator[Mutant]:
    """Yield the mutants of the rules that the reviewed overlay of a release has."""
    reviewed = read_lock(release, product)
    assert reviewed is not None, product.named(release)
    inserted = {r["id"]: (m, r.get("variant", "")) for m in reviewed["modules"] for r in m["rules"]}
    for transform in product.transforms:
        for rule in transform.rules:
            if rule.id in inserted:
                module, variant = inserted[rule.id]
                tests = _cases(transform, rule, variant) + _driven(rule, variant, product, release, module["path"])
                yield Mutant(transform, rule, product, release, tests)


def _cases(transform: Transform, rule: Rule, variant: str) -> tuple[str, ...]:
    """Return the tests of the cases in which the form of the rule is the one that a release has."""
    of = [case for case in transform.cases if case.rule == rule.id]
    forms = [apply_rule(cst.parse_module(case.before), rule, "", case.release)[1].variant for case in of]
    return tuple(
        f"{CASES}[{case.rule}-{case.release}]" for case, form in zip(of, forms, strict=True) if form == variant
    )


def _driven(rule: Rule, variant: str, product: Product, release: str, path: str) -> tuple[str, ...]:
    from tests.transforms.test_ascend_modules import DRIVEN as FUNCTIONS  # noqa: PLC0415 - reads releases at import

    scope = next(form.scope.name for form in rule.variants if form.name == variant)
    is_run = not product.is_default and "schedul" not in path and scope.rpartition(".")[2] in {*FUNCTIONS, "BlockTable"}
    return (f"{DRIVEN}[{release}]",) if is_run else ()


def failed(tests: Sequence[str]) -> set[str]:
    """Run tests in this process.

    Returns:
        Those that failed.

    Raises:
        RuntimeError: If one was not run.
    """
    seen = Outcomes()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *tests], plugins=[seen])
    if seen.passed | seen.failed != set(tests):
        raise RuntimeError(f"not run: {', '.join(set(tests) - seen.passed - seen.failed)}")
    return seen.failed


class Outcomes:
    """A plug-in of pytest that records which tests passed and failed, and why the first one failed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.why = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a part of a test: its fixtures' start, its call, their end."""
        if report.failed and not self.why:
            errors = (line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E "))
            self.why = next(errors, "")
        if report.when == "call":
            (self.passed if report.passed else self.failed).add(report.nodeid)


def survivors(found: Sequence[Mutant]) -> list[str]:
    """Return the mutants that a named unit test does not notice, or that have no such test."""
    healthy = sorted({test for one in found for test in one.tests})
    broken = failed(healthy)
    if broken:
        raise SystemExit(f"these tests fail without a mutant: {', '.join(sorted(broken))}")
    survived = []
    for one in found:
        name = f"{one.product.named(one.release)}: {one.rule.id}"
        if not one.tests:
            survived.append(f"{name}: it has no case of the form that this release has")
            continue
        _forget()
        with mutated(one.rule):
            passed = set(one.tests) - failed(one.tests)
        survived += [f"{name}: {test} passes" for test in sorted(passed)]
    _forget()
    return survived


def _forget() -> None:
    """Forget overlays that tests keep."""
    from tests.transforms import test_ascend_modules  # noqa: PLC0415 - reads releases at import

    test_ascend_modules.overlay.cache_clear()


def _without_results() -> None:
    """Neither use nor keep results: they belong to rules that insert something."""

    def get(*_: object) -> None: ...

    setattr(Results, "get", get)  # noqa: B010 - a method, in a process of its own
    setattr(Results, "keep", get)  # noqa: B010


def switch_rules() -> None:
    """Let this process build overlays whose rules can be switched off, and which no lock has."""
    for rule in (rule for one in products() for transform in one.transforms for rule in transform.rules):
        _change(rule, functools.partial(switchable, rule=rule.id))

    def unreviewed(overlay: Overlay, *_: object) -> Lock:
        return make_lock(overlay, 1)

    for module in (lock, build):
        setattr(module, "check_reviewed", unreviewed)  # noqa: B010 - a function, in a process of its own


def on_engines(found: Sequence[Mutant]) -> list[str]:
    """Return the mutants that the end-to-end test which their rule names does not notice."""
    named = {one.rule.id: one.transform.engine_test(one.rule.id) for one in found}
    variables = {one.rule.id: variable(one.rule.variants[0].edit) for one in found}
    switch_rules()
    survived = []
    for release in dict.fromkeys(one.release for one in found):
        rules = [one.rule.id for one in found if one.release == release]
        is_broken, _, _, told = _engines_fail(release, sorted({named[rule] for rule in rules}))
        if is_broken:
            raise SystemExit(f"these tests fail without a mutant:\n{told[-3000:]}")
        for rule in rules:
            is_killed, seconds, why, told = _engines_fail(release, [named[rule]], {variables[rule]: rule})
            print(
                f"{'killed' if is_killed else 'SURVIVED'} in {seconds:.0f} s: {rule}: {named[rule]}: {why}", flush=True
            )
            if not is_killed:
                survived.append(f"{rule}: {named[rule]}: {told[-300:]}")
    return survived


def _engines_fail(
    release: str, tests: Sequence[str], mutant: Mapping[str, str] | None = None
) -> tuple[bool, float, str, str]:
    """Run end-to-end tests in this process, which keeps the overlays and the processes that have imported vLLM.

    Returns:
        Whether one fails, the seconds, why it fails, which need not be the mutant, and what pytest printed.

    Raises:
        RuntimeError: If they could not be run.
    """
    begin, told, seen = time.monotonic(), io.StringIO(), Outcomes()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        for name, value in {"UCM_E2E_RELEASE": release, **(mutant or {})}.items():
            patch.setenv(name, value)
        options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        code = pytest.main([*options, *tests], plugins=[seen])
    if code not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        raise RuntimeError(f"not run: {', '.join(tests)}: {told.getvalue()[-3000:]}")
    return code == pytest.ExitCode.TESTS_FAILED, time.monotonic() - begin, seen.why, told.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Try the mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="reviewed releases; default: the newest ones")
    parser.add_argument("--engines", action="store_true", help="run end-to-end tests, up to a minute for each rule")
    parser.add_argument("--rule", action="append", default=[], metavar="ID", help="only this rule")
    options = parser.parse_args(arguments)
    named = options.releases or [one.named(one.reviewed()[-1]) for one in products()]
    found = [one for name in named for one in mutants(*parse(name)) if not options.rule or one.rule.id in options.rule]
    if options.engines:
        for one in (one for one in found if one.transform.not_run):
            print(f"no engine: {one.rule.id}: {one.transform.not_run}")
        found = [one for one in found if not one.transform.not_run]
        survived = on_engines(found)
    else:
        _without_results()
        survived = survivors(found)
    for line in survived:
        print(f"survives: {line}")
    tests = sum(len(one.tests) for one in found)
    killed = len(found) - len({line.partition(": tests/")[0] for line in survived})
    print(
        f"{', '.join(named)}: {killed} of {len(found)} mutants are killed"
        + (f" by {tests} tests" * (not options.engines))
    )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
