"""Cases: the least code in which a rule finds its anchor, with the rule's insertion.

Cases are written as text that reads like a rewritten module. A line ``# release 0.32.0`` begins a piece of code of that
release; a line that ends in a rule's mark is that rule's insertion, with the block that it opens:

    # release 0.32.0
    class Scheduler:
        def _free_request(self, request):
            _ucm_hooks.request_freed(self, request)  # ucm: scheduler.freed
            assert request.is_finished()

A piece with the insertions of several rules is a case of each of them: before is the code without any insertion, after
the code with only that rule's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.marks import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER = re.compile(r"^# release (\S+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A short piece of code before and after a rule.

    Attributes:
        rule: The rule's id.
        before: The code without the insertion.
        after: The code with it.
        release: The release that the code represents; it selects the variant.
    """

    rule: str
    before: str
    after: str
    release: str


def cases_beside(file: str, name: str) -> tuple[Case, ...]:
    """Return the cases in ``cases/<name>.py`` beside a file.

    Args:
        file: The ``__file__`` of the module with the rules.
        name: The name of the file of cases.

    Raises:
        RuleDefinitionError: If the file cannot be read or has no cases.
    """
    path = Path(file).parent / "cases" / f"{name}.py"
    try:
        return cases_in(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise RuleDefinitionError(
            "the cases of a transform cannot be read", where=str(error), fix="write them there, or use `cases_in`"
        ) from error


def cases_in(text: str, where: str = "cases") -> tuple[Case, ...]:
    """Return the cases in a text; text before the first release is a comment.

    Args:
        text: The pieces of code, each after the line of its release.
        where: The text's name, for the error message.

    Raises:
        RuleDefinitionError: If a piece has no insertion.
    """
    _, *parts = HEADER.split(text)
    pieces = [tuple(_cases(release, code)) for release, code in zip(parts[::2], parts[1::2], strict=True)]
    if not pieces or not all(pieces):
        raise RuleDefinitionError(
            "a case has no insertion",
            where=where,
            fix="begin each piece of code with `# release …`, and end inserted lines in `# ucm: ` and the rule's id",
        )
    return tuple(case for cases in pieces for case in cases)


def _cases(release: str, code: str) -> Iterator[Case]:
    lines = list(_with_owners(code.strip("\n").splitlines(keepends=True)))
    before = "".join(line for owner, line in lines if not owner)
    for rule in dict.fromkeys(owner for owner, _ in lines if owner):
        yield Case(rule, before, "".join(line for owner, line in lines if owner in {"", rule}), release)


def _with_owners(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each line with the rule that inserts it, or an empty name; the last line gains its line feed."""
    owner, depth = "", 0
    for index, line in enumerate(lines):
        code, mark, rule = line.rstrip("\n").partition(MARK)
        following = next((other for other in lines[index:] if other.strip()), "")
        indent = len(following) - len(following.lstrip())
        if mark:
            owner, depth = rule.strip(), indent if code.rstrip().endswith(":") else len(line)
        elif not indent > depth:
            owner = ""
        # A method is inserted together with the blank line before it.
        code, mark, rule = following.partition(MARK)
        method = rule.strip() if not line.strip() and mark and code.lstrip().startswith("def ") else ""
        yield owner or method, f"{line.rstrip()}\n"
