"""Identify what an engine's blocks depend on: its model, its weights and its sparse method; notice changed weights."""

from __future__ import annotations

import ctypes
import inspect
import traceback
import weakref
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from ucm.background import call_all, call_later, process_cores
from ucm.clock import SYSTEM
from ucm.compat import optional
from ucm.hashing.file_contents import DigestCache, FileChangedError, FileContents, process_started
from ucm.hashing.model_identity import model_identity
from ucm.integration.vllm.connector.prefix_cache import all_tokens
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.integration.vllm.sparse.sharing import method_identity
from ucm.logger import get_logger
from ucm.sparse.factory import method_class
from ucm.store.factory import key_fingerprint
from ucm.store.format import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ucm.background import Later
    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.file_contents import Digests
    from ucm.hashing.model_identity import ModelIdentity
    from ucm.vllm_types import VllmConfig

#: Weights up to this many bytes are read before the engine continues, in less than a tenth of a second. At most
#: ``START_SECONDS`` are spent waiting for a medium that does not answer.
AT_ONCE, START_SECONDS = 64 << 20, 10.0


def engine_identity(
    vllm_config: VllmConfig, settings: ConnectorConfig, geometry: Mapping[str, Any] | None = None
) -> ModelIdentity:
    """Return the facts that the engine's blocks depend on, as far as known without reading the weights.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        settings: The connector's settings.
        geometry: The KV-cache groups and the layout of their KV.

    Raises:
        ConfigError: As for ``model_identity``, and if there is no such sparse method, or the key that authenticates
            blocks cannot be used.
    """
    # A sparse method changes which tokens later ones attend to, and so their KV.
    more = {**method_identity(vllm_config), "geometry": dict(geometry or {})}
    fingerprint = key_fingerprint(settings.store.as_store_config())
    if fingerprint:  # engines with other keys, or none, refuse each other's blocks
        more["authentication"] = fingerprint
    return model_identity(vllm_config, weights_id=settings.weights_id, more=more)


#: How many seconds ``close`` waits for a medium that does not answer.
CLOSE_SECONDS = 5.0


class WeightReader:
    """Identifies the weights that the engine serves, and with them the namespace of its blocks.

    A thread reads the files in the background, while they are in the page cache. Facts that need no reading, or a short
    one, are waited for.

    Args:
        identity: The engine's identity, with the files still to be read.
        settle: Prepares the namespace of a complete identity, and returns its name.
        clock: Time and threads.
    """

    def __init__(
        self, identity: ModelIdentity, settle: Callable[[ModelIdentity], str], *, clock: Clock = SYSTEM
    ) -> None:
        self._identity = identity
        self._settle = settle
        self._contents = FileContents(process_started(), DigestCache(), clock=clock)
        self.namespace = ""  #: of the engine's blocks; empty until it is known
        self._reading: Later[None] | None = None
        self._is_alone = False  # whether no caller waits for the thread any more
        try:
            found = self._contents.look_up(identity.unread.values())
        except (OSError, FileChangedError) as error:
            self._refuse(error)
            return
        nbytes = sum(path.stat().st_size for path in found.unread)
        self._is_alone = nbytes > AT_ONCE
        if self._is_alone:
            get_logger(__name__).info(
                "[UCM.Hasher] %.1f GB of weights are read in the background to identify them; nothing is loaded or "
                "saved until then",
                nbytes / 1e9,
            )
        self._reading = call_later(lambda: self._read(found), "ucm-identity", clock=clock)
        if not self._is_alone:
            self._wait(self._reading)

    def close(self) -> None:
        """Stop reading; a thread that is stuck in a medium is abandoned."""
        self._contents.close()
        if self._reading is not None:
            self._reading.wait(CLOSE_SECONDS)

    def _wait(self, reading: Later[None]) -> None:
        reading.wait(START_SECONDS)
        self._is_alone = True
        if reading.done():  # looked at behind that, so that an error is either raised here or logged there
            reading.result()
        else:
            get_logger(__name__).warning(
                "[UCM.Hasher] the store's directories or the files of the weights have not answered for %.0f s: "
                "nothing is loaded or saved until they do",
                START_SECONDS,
            )

    def _read(self, found: Digests) -> None:
        try:
            found = self._contents.read(found)
            where = self._settle(self._identity.with_contents(found.of))
        except (OSError, FileChangedError) as error:
            self._refuse(error)
        except Exception:
            if self._is_alone:  # else it is raised to the waiting caller
                get_logger(__name__).exception("[UCM.Hasher] this engine runs without the store")
            raise
        else:
            if found.of:
                get_logger(__name__).info(
                    "[UCM.Hasher] the weights were identified after %.2f s: %s", found.seconds, found
                )
            self.namespace = where

    def _refuse(self, error: Exception) -> None:
        get_logger(__name__).warning(
            "[UCM.Hasher] this engine loads and saves nothing, because its weights cannot be identified: %s", error
        )


def lasting_tokens(vllm_config: VllmConfig) -> Callable[[int], int]:
    """Return a function from a prompt's length to how many of the tokens have KV that depends on tokens only."""
    found = sparse_method_config(vllm_config)
    if found is None:
        return all_tokens
    name, options = found
    return partial(method_class(name).lasting_tokens, options)


def frees_blocks(vllm_config: VllmConfig) -> bool:
    """Return whether the sparse method, if there is one, frees blocks of running requests."""
    found = sparse_method_config(vllm_config)
    return found is not None and method_class(found[0]).frees_blocks


#: Seconds without a step after which values on an accelerator are checked. A change takes longer than this, including
#: its way to the worker.
PAUSE = 0.005
#: The most threads that read all weights in host memory.
MOST_READERS = 8
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
    """Detects changes of a worker's weights since they were loaded, by a fingerprint of the model's tensors.

    vLLM does not tell a connector that weights were changed in place, by ``reload_weights``, by weight transfer or
    directly by a trainer. So the worker checks them:

    - before every step that moves blocks: each tensor's address, torch's count of its changes, and some of its values;
      on an accelerator, where reading values means waiting for it, these values only after a pause long enough for a
      change;
    - after vLLM's prefix cache was emptied, as is done when weights are changed: every byte.

    Args:
        model: A torch module. Its parameters are watched and its persistent buffers, which checkpoints hold as well.
            Other buffers are not, because a forward may write to them.
        thorough: Check every byte after each pause, because changes are to be expected.
        clock: Measures pauses.
    """

    def __init__(self, model: Any, *, thorough: bool = False, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._thorough = thorough
        self._model = weakref.ref(model)
        self._positions: dict[int, Any] = {}
        self._looked = self._clock.monotonic()
        self._paused = False  # since values were last read
        self._on_host = all(tensor.device.type == "cpu" for tensor in self._all())
        self._note()

    def changed(self, *, wholly: bool = False) -> bool:
        """Return whether the weights changed since this last returned True, or since the start.

        Args:
            wholly: Check every byte.
        """
        paused, self._paused = self._paused, False
        wholly = wholly or (paused and self._thorough)
        same = self._places() == self._seen_places
        if same and (wholly or paused or self._on_host):
            same = self._packed() == self._seen_packed and (
                self._digest() == self._seen_digest if wholly else self._sample() == self._seen_sample
            )
        if not same:
            self._note()
        return not same

    def step(self) -> None:
        """Begin a step; after a pause, the next check also reads values."""
        now = self._clock.monotonic()
        self._paused |= now - self._looked > PAUSE
        self._looked = now

    def stepped(self) -> None:
        """End a step."""
        self._looked = self._clock.monotonic()

    def _note(self) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in self._all()]
        self._spots = [spot for memory in self._memory() for spot in _spots(memory)] if self._on_host else []
        self._seen_packed = self._packed()
        self._seen_places, self._seen_sample, self._seen_digest = self._places(), self._sample(), self._digest()

    def _all(self) -> Iterator[Any]:
        model = self._model()
        if model is None:
            return
        yield from model.parameters()
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public name for it
                    yield buffer

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
        """Return checksums of all bytes of each tensor; on an accelerator sums, which detect any exchange of rows."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            if self._on_host:
                # Not by torch, whose threads wait for each other, tensor by tensor: also for one that waits for a
                # processor, as others read blocks at that time. Half of the processors is for those: on two, short
                # prompts waited longer for two threads.
                calls = [partial(checksum, memory.numpy()) for memory in self._memory()]
                threads = min(MOST_READERS, len(process_cores()) // 2) - 1
                reads = call_all(calls, "ucm-weights", threads, helps=True, clock=self._clock)
                return [read.result() for read in reads]
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
        return cls(model) if optional(model, "lora_manager") is not None else None

    def replaced(self) -> frozenset[int]:
        """Return the numbers (``lora_int_id``) of all replaced adapters, as far as calls of this method noticed.

        An adapter that was evicted and is loaded again later is not included: its next request identifies it.
        """
        manager = self._manager()
        there = {} if manager is None else manager.list_adapters()
        self._replaced |= {number for number, was in self._seen.items() if there.get(number, was()) is not was()}
        self._seen = {number: weakref.ref(adapter) for number, adapter in there.items()}
        return self._replaced
