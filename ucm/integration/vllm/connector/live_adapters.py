"""Detect that a loaded LoRA adapter was replaced in place, by vLLM's ``load_inplace``.

vLLM does not report this to a connector, and running requests of the adapter continue with the new weights. Every
replacement gives vLLM's manager another object under the adapter's number.
"""

from __future__ import annotations

import weakref
from typing import Any


class LiveAdapters:
    """Watches the adapters of a model.

    Args:
        model: vLLM's model, which has the LoRA manager.
    """

    def __init__(self, model: Any) -> None:
        self._manager = weakref.ref(model.lora_manager)
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._replaced: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: Any) -> LiveAdapters | None:
        """Return a watcher for a model's adapters; None if the model has no LoRA manager."""
        return cls(model) if getattr(model, "lora_manager", None) is not None else None

    def replaced(self) -> frozenset[int]:
        """Return the numbers (``lora_int_id``) of all replaced adapters, as far as calls of this method noticed.

        An adapter that was evicted and is loaded again later is not included: its next request identifies it.
        """
        manager = self._manager()
        there = {} if manager is None else manager.list_adapters()
        self._replaced |= {number for number, was in self._seen.items() if there.get(number, was()) is not was()}
        self._seen = {number: weakref.ref(adapter) for number, adapter in there.items()}
        return self._replaced
