"""What a sparse method does with each request of a worker: counted by outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterable

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
        #: The running requests, and whether an outcome has been counted.
        self._running: dict[str, bool] = {}
        self._restricted: set[str] = set()

    def begin(self, request_ids: Iterable[str]) -> None:
        """Note the requests of a step."""
        for request_id in request_ids:
            self._running.setdefault(request_id, False)

    def restrict(self, request_ids: Iterable[str]) -> None:
        """Count requests of which a step reads less than their context, each once."""
        for request_id in request_ids:
            if request_id not in self._restricted:
                self._restricted.add(request_id)
                self._count(request_id, RESTRICTED)

    def exclude(self, request_ids: Iterable[str], outcome: str) -> None:
        """Count requests that are dense from here on."""
        for request_id in request_ids:
            self._count(request_id, outcome)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Count ended requests that have no outcome yet as short, and forget all of them."""
        for request_id in request_ids:
            if self._running.pop(request_id, True) is False:
                self._counts[f"requests_{SHORT}"] += 1
            self._restricted.discard(request_id)

    def figures(self, outcomes: Collection[str]) -> dict[str, float]:
        """Return the counts of some outcomes, as `SparseMethod.figures` names them."""
        return {f"requests.{outcome}": self._counts[f"requests_{outcome}"] for outcome in outcomes}

    def _count(self, request_id: str, outcome: str) -> None:
        self._running[request_id] = True
        self._counts[f"requests_{outcome}"] += 1
