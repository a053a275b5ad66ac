"""The governance record: why a transform exists, where it runs and when it is removed. All fields are required."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from transforms.engine.errors import RuleDefinitionError

#: The minimum number of words in a text field; fewer cannot answer its question.
FEWEST_WORDS = 6


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
LINKED = (UpstreamStatus.SUBMITTED, UpstreamStatus.REJECTED, UpstreamStatus.CLOSED)


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

    def check(self, transform: str) -> None:
        """Reject an incomplete record.

        Raises:
            RuleDefinitionError: If a field is empty or too short, or a link is missing or not an https address.
        """
        texts = {"why": self.why, "how": self.how, "removal": self.removal, "upstream.reason": self.upstream.reason}
        for name, text in texts.items():
            if len(text.split()) < FEWEST_WORDS:
                raise RuleDefinitionError(
                    f"the governance record's `{name}` is too short to answer its question",
                    where=f"transform {transform}",
                    fix=f"write at least {FEWEST_WORDS} words that a reviewer can check",
                )
        if not self.processes:
            raise RuleDefinitionError("the governance record names no process", where=f"transform {transform}")
        if self.upstream.status in LINKED and not self.upstream.link:
            raise RuleDefinitionError(
                f"the upstream status `{self.upstream.status.value}` has no link that shows it",
                where=f"transform {transform}",
                fix="link the issue or the pull request, or use another status",
            )
        if self.upstream.link and not self.upstream.link.startswith("https://"):
            raise RuleDefinitionError("the upstream link is not an https address", where=f"transform {transform}")
