"""Detect that a worker's weights changed since they were loaded, by a fingerprint of the tensors.

vLLM does not tell a connector that weights were changed in place, by ``reload_weights``, by weight transfer or directly
by a trainer. So the worker checks them, as closely as is nearly free:

- before every step that moves blocks: each tensor's address, torch's count of its changes, and some of its values; on
  an accelerator, where reading values means waiting for it, these values only after a pause long enough for a change;
- after vLLM's prefix cache was emptied, as is done when weights are changed: every byte.
"""

from __future__ import annotations

import ctypes
import inspect
import time
import traceback
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds without a step after which values on an accelerator are checked. A change takes longer than this, including
#: its way to the worker.
PAUSE = 0.005
#: Eight-byte words sampled from each tensor.
SAMPLE = 64
#: In host memory the sample consists of this many ranges, copied together: about 30 µs for 300 tensors.
_SPOTS = 4
_ROW = 4096
#: vLLM's name for the function that a layer computes with on a CPU; the function holds the packed weights.
_PACKED = "cpu_linear"


def running_model() -> Any:
    """Return the model of the calling runner, from one of its frames; None if no frame has one.

    A connector receives neither its runner nor the model, but a method of the runner calls it.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        caller = frame.f_locals.get("self")
        if callable(getattr(type(caller), "get_model", None)):
            return cast("Any", caller).get_model()
    return None


class LiveWeights:
    """Watches the tensors of a model.

    Args:
        model: A torch module, whose parameters are watched. Buffers are not, because a forward may write to them.
        thorough: Check every byte after each pause, because changes are to be expected.
    """

    def __init__(self, model: Any, *, thorough: bool = False) -> None:
        self._thorough = thorough
        self._model = weakref.ref(model)
        self._positions: dict[int, Any] = {}
        self._looked = time.monotonic()
        self._doubted = False
        self._on_host = all(tensor.device.type == "cpu" for tensor in self._all())
        self._note()

    def changed(self, *, wholly: bool = False) -> bool:
        """Return whether the weights changed since this last returned True, or since the start.

        Args:
            wholly: Check every byte, however recent the last check is.
        """
        doubted, self._doubted = self._doubted, False
        values = wholly or doubted or self._on_host
        same = self._places() == self._seen_places
        if same and values:
            same = self._packed() == self._seen_packed
        if same and (wholly or (doubted and self._thorough)):
            same = self._digest() == self._seen_digest
        elif same and values:
            same = self._sample() == self._seen_sample
        if not same:
            self._note()
        return not same

    def step(self) -> None:
        """Begin a step; after a pause, the next check also reads values."""
        now = time.monotonic()
        self._doubted |= now - self._looked > PAUSE
        self._looked = now

    def stepped(self) -> None:
        """End a step."""
        self._looked = time.monotonic()

    def _note(self) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in self._all()]
        self._spots = [spot for memory in self._memory() for spot in _spots(memory)] if self._on_host else []
        self._seen_packed = self._packed()
        self._seen_places, self._seen_sample, self._seen_digest = self._places(), self._sample(), self._digest()

    def _all(self) -> Iterator[Any]:
        model = self._model()
        if model is not None:
            yield from model.parameters()

    def _packed(self) -> list[weakref.ref[Any]]:
        """Return references to functions with weights that were packed for the processor and are no parameters.

        Loading weights again creates new functions. Weak references are equal if they refer to the same object.
        """
        model = self._model()
        modules = () if model is None else model.modules()
        found = (vars(module).get(_PACKED) for module in modules)
        return [weakref.ref(function) for function in found if isinstance(function, FunctionType)]

    def _places(self) -> list[tuple[int, int]]:
        """Return each tensor's address and torch's count of its changes; ``(0, -1)`` for a tensor that is gone."""
        found = []
        for reference in self._tensors:
            tensor = reference()
            if tensor is None:
                found.append((0, -1))
            else:
                found.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version))  # noqa: SLF001
        return found

    def _memory(self) -> Iterator[Any]:
        """Yield the memory behind the tensors, each storage once: uint8[bytes]."""
        import torch  # noqa: PLC0415 - only available beside vLLM

        seen = set()
        for tensor in self._all():
            storage = tensor.untyped_storage()
            if storage.nbytes() and not tensor.is_meta and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    def _words(self) -> Iterator[Any]:
        """Yield the same memory as words: int64[words]."""
        import torch  # noqa: PLC0415

        for memory in self._memory():
            count = len(memory) // 8
            if count:
                yield memory[: count * 8].view(torch.int64)
            if len(memory) % 8:
                yield memory[count * 8 :].to(torch.int64)

    def _sample(self) -> bytes | list[int]:
        """Return some words of each tensor, from fixed pseudo-random positions."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            if self._spots:
                return bytes(memoryview(torch.cat(self._spots).numpy()))
            parts = []
            for number, words in enumerate(self._words()):
                if number not in self._positions or self._positions[number][0] != len(words):
                    source = torch.Generator().manual_seed(number)
                    places = torch.randint(len(words), (min(SAMPLE, len(words)),), generator=source)
                    self._positions[number] = (len(words), places.to(words.device))
                parts.append(words.index_select(0, self._positions[number][1]))
            return _values(parts)

    def _digest(self) -> list[int]:
        """Return checksums of all words of each tensor, which detect any single change and any exchange of rows."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            sums = []
            for words in self._words():
                rows = len(words) // _ROW
                each = words[: rows * _ROW].view(rows, _ROW).sum(1)
                odd = torch.arange(rows, device=words.device) * 2 + 1
                sums += [(each * odd).sum(0, keepdim=True), words[rows * _ROW :].sum(0, keepdim=True)]
            return _values(sums)


def _spots(memory: Any) -> list[Any]:
    """Return ranges of a tensor's memory, uint8, that do not keep it alive: check that it is before reading them."""
    import torch  # noqa: PLC0415

    nbytes = min(len(memory), 8 * SAMPLE // _SPOTS)
    source = torch.Generator().manual_seed(len(memory))
    places = torch.randint(len(memory) - nbytes + 1, (_SPOTS,), generator=source).tolist()
    return [
        torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(memory.data_ptr() + place), dtype=torch.uint8)
        for place in dict.fromkeys(places)
    ]


def _values(tensors: list[Any]) -> list[int]:
    """Return the values of tensors, concatenated by device; each device is waited for once."""
    import torch  # noqa: PLC0415

    by_device: dict[Any, list[Any]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return [value for group in by_device.values() for value in torch.cat(group).tolist()]


class LiveAdapters:
    """Detects that a loaded LoRA adapter was replaced in place, by vLLM's ``load_inplace``.

    vLLM does not report this to a connector, and running requests of the adapter continue with the new weights. Every
    replacement gives vLLM's manager another object under the adapter's number.

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
