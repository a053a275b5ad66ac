"""Whether a LoRA adapter was replaced while the worker had it: vLLM's ``load_inplace``.

vLLM does not tell a connector of it, and requests of the adapter that are running go on with the new weights. Whatever
replaces an adapter gives vLLM's manager another object under the adapter's number.
"""

from __future__ import annotations

import weakref
from typing import Any


class LiveAdapters:
    """Watches the adapters of a model.

    Args:
        model: vLLM's model, which has the manager of its adapters.
    """

    def __init__(self, model: Any) -> None:
        self._manager = weakref.ref(model.lora_manager)
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._replaced: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: Any) -> LiveAdapters | None:
        """Those of a model; None if it has none."""
        return cls(model) if getattr(model, "lora_manager", None) is not None else None

    def replaced(self) -> frozenset[int]:
        """The numbers (``lora_int_id``) of all adapters that were replaced so far, as seen at the calls of this.

        One that was evicted, and is loaded again later, is not among them: its next request says what it is.
        """
        manager = self._manager()
        there = {} if manager is None else manager.list_adapters()
        self._replaced |= {number for number, was in self._seen.items() if there.get(number, was()) is not was()}
        self._seen = {number: weakref.ref(adapter) for number, adapter in there.items()}
        return self._replaced
