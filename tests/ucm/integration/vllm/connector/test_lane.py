"""The threads of the staged transfer use their rank's device; tested with a stand-in for torch's module."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.transfer import _Lane
from ucm.store.base import TransferTask

if TYPE_CHECKING:
    from tests.clock import SimulatedClock


class Module:
    """Like ``torch.cuda``: each thread has its own current device, initially 0."""

    def __init__(self) -> None:
        self.devices: dict[int, Any] = {}

    def set_device(self, device: Any) -> None:
        self.devices[threading.get_ident()] = device

    def current_device(self) -> Any:
        return self.devices.get(threading.get_ident(), 0)

    def current_stream(self) -> Any:
        return SimpleNamespace(record_event=lambda: "event")


def lane(clock: SimulatedClock) -> _Lane:
    memory: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"), staging=lambda _: [])
    return _Lane(memory, 1, "ucm-test", stagings=1, clock=clock)


def run(clock: SimulatedClock, lane: _Lane, work: Any) -> None:
    task = TransferTask(1, clock=clock)
    lane.submit(work, lambda _: task.end({}))
    task.wait()


def test_the_thread_has_the_device_of_its_stream(clock: SimulatedClock) -> None:
    module, seen = Module(), []
    found = lane(clock)
    found._module, found._device = module, 3
    run(clock, found, lambda event: seen.append((module.current_device(), event)))
    found.close()
    assert seen == [(3, "event")]
    assert module.current_device() == 0, "the caller's device is left alone"


def test_on_the_host_there_is_no_device_to_set(clock: SimulatedClock) -> None:
    seen: list[Any] = []
    found = lane(clock)
    run(clock, found, seen.append)
    found.close()
    assert seen == [None]
