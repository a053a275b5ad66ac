"""What UCM's own methods share: options, counters, and what becomes of each request of a worker."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from ucm.logger import get_logger
from ucm.sparse.base import SparseMethod
from ucm.sparse.options import MethodOptions, parse_options

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ucm.errors import ConfigError
    from ucm.sparse.base import Role

RESTRICTED = "restricted"  #: a step of it read less than its context
SHORT = "short"  #: it ended before that, without another reason
OPTED_OUT = "opted_out"
REFUSED = "refused"  #: its options could not be honoured
FAILED = "failed"
OUT_OF_MEMORY = "out_of_memory"  #: as `FAILED`, because the device had no memory left
#: All outcomes. A request has one; if it fails after it was restricted, two.
OUTCOMES = (RESTRICTED, SHORT, OPTED_OUT, REFUSED, FAILED, OUT_OF_MEMORY)


class RequestOutcomes:
    """The outcomes of the requests of a worker; used by one thread.

    Args:
        counts: The method's counters; each outcome adds to ``requests_<outcome>``.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        #: The running requests, and the outcomes that were counted of each.
        self._running: dict[str, set[str]] = {}

    def begin(self, request_ids: Iterable[str]) -> None:
        """Note the requests of a step."""
        for request_id in request_ids:
            self._running.setdefault(request_id, set())

    def count(self, request_ids: Iterable[str], outcome: str) -> None:
        """Count requests that a step reads less of than their context, or that are dense from here on; each once."""
        for request_id in request_ids:
            known = self._running.setdefault(request_id, set())
            if outcome not in known:
                known.add(outcome)
                self._counts[f"requests_{outcome}"] += 1

    def finish(self, request_ids: Iterable[str]) -> None:
        """Count ended requests that have no outcome yet as short, and forget all of them."""
        for request_id in request_ids:
            if self._running.pop(request_id, None) == set():
                self._counts[f"requests_{SHORT}"] += 1

    def figures(self, outcomes: Collection[str]) -> dict[str, float]:
        """Return the counts of some outcomes, as `SparseMethod.figures` names them."""
        return {f"requests.{outcome}": self._counts[f"requests_{outcome}"] for outcome in outcomes}


class CountingMethod(SparseMethod):
    """A method of UCM's own.

    Attributes:
        counts: Counters, among them ``steps`` and ``requests_<outcome>``.

    Raises:
        ConfigError: If an option is wrong.
    """

    options_type: ClassVar[type[MethodOptions]]

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._name = type(self).__name__
        self._options: Any = parse_options(self.options_type, self._name, options)
        self.counts: Counter[str] = Counter()
        self._outcomes = RequestOutcomes(self.counts)

    def worker_started(self) -> None:
        """Refuse an unsupported engine."""
        self.attention.require_engine(latent=self.serves_latent, drafts=self.serves_drafts, hybrid=self.serves_hybrids)

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Drop the state of ended requests."""
        del runner
        self._outcomes.finish(request_ids)

    def _leave_dense(self, request_id: str, error: ConfigError | None = None) -> None:
        """Count a request that is dense because it asks for it, or because of an error in its options."""
        self._outcomes.count([request_id], OPTED_OUT if error is None else REFUSED)
        if error is not None:
            self.complaints.tell(request_id, error, "it is dense")

    def summary(self) -> str:
        """Return the counters so far, in one line."""
        raise NotImplementedError

    def _count_step(self) -> None:
        """Count a step in which the method did something; log after 1, 2, 4, …: often enough, never too often."""
        self.counts["steps"] += 1
        if self.counts["steps"].bit_count() == 1:
            get_logger(__name__).info("[UCM.Sparse] %s", self.summary())
