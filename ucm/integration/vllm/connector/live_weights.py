"""Whether a worker's weights are still those that it loaded: a fingerprint of the tensors themselves.

vLLM does not tell a connector that weights were changed in place, by ``reload_weights``, by weight transfer or by a
trainer's own hands. So the worker looks, as closely as it costs next to nothing:

- before every step that moves blocks: where each tensor lies, torch's count of changes to it, and some of its values;
  on an accelerator, which would have to be waited for, these values only after a pause in which a change would have
  been made;
- after vLLM's prefix cache was emptied, as whoever changes weights does it: every byte.
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

#: Seconds without a step after which values on an accelerator are looked at. A change takes longer, and so does its way
#: to the worker.
PAUSE = 0.005
#: Eight-byte words that are looked at in each tensor.
SAMPLE = 64
#: In host memory they lie in so many places, and are copied together: some 30 µs for 300 tensors.
_SPOTS = 4
_ROW = 4096
#: What vLLM calls the function that a layer computes with on a CPU; it holds the packed weights.
_PACKED = "cpu_linear"


def running_model() -> Any:
    """The model of the runner that is calling, from one of its frames; None if none of them has one.

    A connector is given neither its runner nor the model. What calls it is a runner's method.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        caller = frame.f_locals.get("self")
        if callable(getattr(type(caller), "get_model", None)):
            return cast("Any", caller).get_model()
    return None


class LiveWeights:
    """Watches the tensors of a model.

    Args:
        model: A torch module: its parameters are watched. Buffers are not, because a forward may write them.
        thorough: Look at every byte after each pause, because changes are to be expected.
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
        """Whether the weights have changed since the last call that said so, or since the beginning.

        Args:
            wholly: Look at every byte, however long the last look is ago.
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
        """A step begins; a pause before it makes the weights doubtful until the next look."""
        now = time.monotonic()
        self._doubted |= now - self._looked > PAUSE
        self._looked = now

    def stepped(self) -> None:
        """A step has ended."""
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
        """What computes with weights that were packed for the processor, and are no parameters any more.

        It is made anew when weights are loaded anew. Weak references are equal where what they refer to is the same.
        """
        model = self._model()
        modules = () if model is None else model.modules()
        found = (vars(module).get(_PACKED) for module in modules)
        return [weakref.ref(function) for function in found if isinstance(function, FunctionType)]

    def _places(self) -> list[tuple[int, int]]:
        """Where each tensor lies and how often torch saw it change; of one that was replaced, that it is gone."""
        found = []
        for reference in self._tensors:
            tensor = reference()
            if tensor is None:
                found.append((0, -1))
            else:
                found.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version))  # noqa: SLF001
        return found

    def _memory(self) -> Iterator[Any]:
        """The memory behind the tensors, once each: uint8[bytes]."""
        import torch  # noqa: PLC0415 - only there where vLLM is

        seen = set()
        for tensor in self._all():
            storage = tensor.untyped_storage()
            if storage.nbytes() and not tensor.is_meta and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    def _words(self) -> Iterator[Any]:
        """The same as whole words: int64[words]."""
        import torch  # noqa: PLC0415

        for memory in self._memory():
            count = len(memory) // 8
            if count:
                yield memory[: count * 8].view(torch.int64)
            if len(memory) % 8:
                yield memory[count * 8 :].to(torch.int64)

    def _sample(self) -> bytes | list[int]:
        """Some words of each tensor, at places that look random and stay the same."""
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
        """A checksum of all words of each tensor, that tells any one change and any exchange of rows."""
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
    """Some bytes of a tensor's memory, uint8, that do not keep it alive: whoever reads them has seen that it is."""
    import torch  # noqa: PLC0415

    nbytes = min(len(memory), 8 * SAMPLE // _SPOTS)
    source = torch.Generator().manual_seed(len(memory))
    places = torch.randint(len(memory) - nbytes + 1, (_SPOTS,), generator=source).tolist()
    return [
        torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(memory.data_ptr() + place), dtype=torch.uint8)
        for place in dict.fromkeys(places)
    ]


def _values(tensors: list[Any]) -> list[int]:
    """The values of some tensors, one after the other, by device; a device is waited for once."""
    import torch  # noqa: PLC0415

    by_device: dict[Any, list[Any]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return [value for group in by_device.values() for value in torch.cat(group).tolist()]
