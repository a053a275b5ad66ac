"""The governance record: why a transform exists, where it runs and when it is removed. All fields are required."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from transforms.engine.errors import RuleDefinitionError

#: The minimum number of different words in a text field; fewer cannot answer its question. Names, words of one or two
#: letters and words that repeat one letter do not count.
FEWEST_WORDS = 4
WORD = re.compile(r"(?<![^\W\d_])([^\W\d_])(?!\1+(?![^\W\d_]))[^\W\d_]{2,}")
PLACEHOLDER = re.compile(
    r"\b(?:TODO|TBD|FIXME|XXX|lorem ipsum|foo bar|asdf|blah|qwerty|placeholder|to be (?:done|filled|written))\b",
    re.IGNORECASE,
)

#: The question that each text of a record answers. `init` writes them: a text that repeats it is no answer.
QUESTIONS = {
    "why": "what cannot be done without this change, and who needs it",
    "how": "what is inserted, and why that is enough",
    "upstream.reason": "whether this was proposed to the package's maintainers, and what they said",
    "removal": "what has to happen before this change can be deleted",
    "not_counted": "why the package has no other place of this kind",
}


def check_reason(text: str, what: str, where: str) -> None:
    """Reject a text that cannot answer a reviewer's question.

    Args:
        text: The text.
        what: What it is, for the error message.
        where: The rule, transform or sites that it belongs to.

    Raises:
        RuleDefinitionError: If it has too few different words, or is a placeholder.
    """
    if len({found[0].lower() for found in WORD.finditer(text)}) < FEWEST_WORDS:
        raise RuleDefinitionError(
            f"{what} is too short to answer its question",
            where=where,
            fix=f"write at least {FEWEST_WORDS} different words that a reviewer can check",
        )
    if found := PLACEHOLDER.search(text):
        raise RuleDefinitionError(f"{what} is a placeholder: {found[0]!r}", where=where, fix="write the reason")


class Process(Enum):
    """The processes of a running vLLM."""

    MAIN = "main"
    ENGINE_CORE = "EngineCore"
    WORKER = "worker"


class UpstreamStatus(Enum):
    """Whether a change was offered to vLLM, and the result."""

    NOT_SUBMITTED = "not submitted"
    SUBMITTED = "submitted"  #: offered, and still open
    ACCEPTED = "accepted"
    RELEASED = "released"
    REJECTED = "rejected"  #: the link shows that a maintainer declined it
    CLOSED = "closed"  #: closed without the change; the link does not show that a maintainer declined it
    INAPPROPRIATE = "inappropriate"


#: The results that only the linked discussion shows.
LINKED = (UpstreamStatus.SUBMITTED, UpstreamStatus.ACCEPTED, UpstreamStatus.REJECTED, UpstreamStatus.CLOSED)


@dataclass(frozen=True)
class Upstream:
    """The upstream status of a change, with its evidence.

    Attributes:
        status: Whether it was offered, and the result.
        link: The issue or pull request; if empty, ``reason`` says why there is none.
        reason: Why there is no link, or what the link shows.
    """

    status: UpstreamStatus
    reason: str
    link: str = ""


@dataclass(frozen=True)
class Governance:
    """The record that every transform carries.

    Attributes:
        why: What UCM cannot do without it.
        how: What it inserts and why that is enough.
        processes: Where the rewritten code runs.
        upstream: Its upstream status.
        removal: The condition under which the transform is deleted.
    """

    why: str
    how: str
    processes: tuple[Process, ...]
    upstream: Upstream
    removal: str

    @property
    def texts(self) -> dict[str, str]:
        """Its texts, by the names of their fields."""
        return {"why": self.why, "how": self.how, "removal": self.removal, "upstream.reason": self.upstream.reason}

    def check(self, transform: str, *, shown: bool = False) -> None:
        """Reject an incomplete record.

        Args:
            transform: The transform's id, for the error message.
            shown: Whether its rules find in the sources that a release has what they insert.

        Raises:
            RuleDefinitionError: If a field is empty or too short, or a link is missing or not an https address.
        """
        for name, text in self.texts.items():
            check_reason(text, f"the governance record's `{name}`", f"transform {transform}")
        if not self.processes:
            raise RuleDefinitionError("the governance record names no process", where=f"transform {transform}")
        linked = (*LINKED, *([] if shown else [UpstreamStatus.RELEASED]))
        if self.upstream.status in linked and not self.upstream.link:
            raise RuleDefinitionError(
                f"the upstream status `{self.upstream.status.value}` has no link that shows it",
                where=f"transform {transform}",
                fix="link the issue or the pull request, or use another status",
            )
        if self.upstream.link and not self.upstream.link.startswith("https://"):
            raise RuleDefinitionError("the upstream link is not an https address", where=f"transform {transform}")
