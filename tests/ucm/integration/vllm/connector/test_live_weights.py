"""In-place changes of a model's weights are detected in its tensors, however they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests beside vLLM")

import torch

from ucm.integration.vllm.connector import identity
from ucm.integration.vllm.connector.identity import LiveWeights, running_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clock import SimulatedClock

pytest_plugins = ("tests.simulated",)

KINDS = (torch.float32, torch.bfloat16, torch.int8)


def model() -> Any:
    """Return layers of several dtypes and sizes, one with transposed weights, two with shared weights."""
    source = torch.Generator().manual_seed(0)
    made = torch.nn.Module()
    for number, dtype in enumerate(KINDS):
        values = torch.randint(-100, 100, (130, 67), generator=source).to(dtype)
        made.register_parameter(f"w{number}", torch.nn.Parameter(values, requires_grad=False))
    made.register_parameter("turned", torch.nn.Parameter(torch.rand(40, 30, generator=source).t(), requires_grad=False))
    made.register_parameter("tied", made.w0)
    made.register_parameter("none", torch.nn.Parameter(torch.empty(0), requires_grad=False))
    made.register_buffer("scale", torch.ones(1))
    made.register_buffer("seen", torch.zeros(3), persistent=False)
    return made


def copy(made: Any) -> None:
    with torch.no_grad():
        made.w1.copy_(made.w1 + 1)


def copy_in_inference_mode(made: Any) -> None:
    with torch.inference_mode():
        made.w1.copy_(made.w1 + 1)


def replace_data(made: Any) -> None:
    made.w1.data = made.w1.data + 1


def replace_parameter(made: Any) -> None:
    made.w1 = torch.nn.Parameter(made.w1.data.clone() + 1, requires_grad=False)


def write_data(made: Any) -> None:
    """Write like vLLM's weight loaders, which bypass torch's version counter."""
    made.w1.data.copy_(made.w1.data + 1)


class Watch:
    """Begins to watch weights, and lets time pass."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock

    def here(self, made: Any) -> LiveWeights:
        """Return a watch of weights in host memory."""
        return LiveWeights(made, clock=self.clock)

    def elsewhere(self, made: Any) -> LiveWeights:
        """Return a watch of the weights as if they were on an accelerator."""
        weights = LiveWeights(made, clock=self.clock)
        weights._on_host = False
        weights._note()
        return weights

    def pause(self, weights: LiveWeights, seconds: float) -> None:
        """Let time pass between two steps."""
        weights.stepped()
        self.clock.advance(seconds)
        weights.step()


@pytest.fixture
def watch(clock: SimulatedClock) -> Watch:
    return Watch(clock)


def write_one_value(made: Any) -> None:
    made.w1.data[77, 50] += 1


def scale(made: Any) -> None:
    made.scale *= 2


@pytest.mark.parametrize("cores", [set(), {0}, set(range(100))])
def test_every_byte_is_read_however_many_threads_do_it(monkeypatch: pytest.MonkeyPatch, cores: set[int]) -> None:
    made = model()
    weights = LiveWeights(made)
    monkeypatch.setattr(identity, "process_cores", lambda: cores)
    assert not weights.changed(wholly=True)
    for parameter in filter(torch.numel, made.parameters()):
        with torch.no_grad():
            parameter.data[..., -1] += 1
        assert [weights.changed(wholly=True) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("change", [copy, copy_in_inference_mode, replace_data, replace_parameter, scale])
def test_what_torch_counts_is_seen_at_every_step(change: Callable[[Any], None]) -> None:
    made = model()
    weights = LiveWeights(made)
    assert not weights.changed()
    change(made)
    assert [weights.changed() for _ in range(2)] == [True, False]


def test_what_torch_does_not_count_is_seen_in_host_memory_at_every_step() -> None:
    made = model()
    weights = LiveWeights(made)
    for _ in range(2):
        write_data(made)
        weights.step()
        assert [weights.changed() for _ in range(2)] == [True, False]


def test_weights_that_are_watched_are_not_kept_alive() -> None:
    made = torch.nn.Linear(64, 64, bias=False)

    def holders() -> int:
        return int(torch._C._storage_Use_Count(made.weight.untyped_storage()._cdata))

    before = holders()
    weights = LiveWeights(made)
    assert holders() == before
    made.weight = torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    assert [weights.changed() for _ in range(2)] == [True, False]


def test_on_an_accelerator_what_torch_does_not_count_is_seen_after_a_pause(watch: Watch) -> None:
    made = model()
    weights = watch.elsewhere(made)
    write_data(made)
    watch.pause(weights, identity.PAUSE)
    assert not weights.changed()
    watch.pause(weights, identity.PAUSE + 0.001)
    assert [weights.changed() for _ in range(2)] == [True, False]


def test_a_pause_is_remembered_until_somebody_looks(watch: Watch) -> None:
    made = model()
    weights = watch.elsewhere(made)
    write_data(made)
    watch.pause(weights, 2 * identity.PAUSE)
    weights.stepped()
    weights.step()
    assert weights.changed()


def test_every_single_value_is_seen_when_all_are_looked_at() -> None:
    made = model()
    weights = LiveWeights(made)
    source, seen = torch.Generator().manual_seed(1), 0
    places = torch.randint(130 * 67, (60,), generator=source).tolist()
    assert not weights.changed(wholly=True)
    for number, place in enumerate(places):
        values = getattr(made, f"w{number % 3}").data.view(-1)
        was = values[place].item()
        values[place] = was + 1
        seen += weights.changed(wholly=True)
        values[place] = was
        assert weights.changed(wholly=True)
    write_one_value(made)
    assert weights.changed(wholly=True)
    assert not weights.changed(wholly=True)
    assert seen == 60


def test_where_changes_are_to_be_expected_every_value_is_looked_at_after_a_pause(watch: Watch) -> None:
    made = torch.nn.Linear(4096, 64, bias=False)
    weights = [LiveWeights(made, thorough=thorough, clock=watch.clock) for thorough in (True, False)]
    made.weight.data[5, 7] += 1
    for each in weights:
        watch.pause(each, 2 * identity.PAUSE)
    assert [each.changed() for each in weights] == [True, False]


def test_rows_that_change_places_are_seen() -> None:
    made = torch.nn.Linear(4096, 64, bias=False)
    weights = LiveWeights(made)
    made.weight.data[:] = made.weight.data.roll(2, 0)
    assert weights.changed(wholly=True)


def test_what_a_forward_writes_is_no_change() -> None:
    made = model()
    weights = LiveWeights(made)
    made.seen += 1
    assert not weights.changed(wholly=True)


def test_weights_that_are_packed_for_a_processor_are_seen_when_they_are_packed_anew(watch: Watch) -> None:
    """On a CPU, vLLM keeps an empty parameter, and a function that holds the packed weights."""

    def pack(layer: Any, value: float) -> None:
        layer.cpu_linear = lambda x, weight, bias: (x, weight, bias, value)

    made = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    for layer in made:
        pack(layer, 1.0)
    weights = watch.here(made)
    assert not weights.changed(wholly=True)
    for layer in made:
        pack(layer, 2.0)
    assert [weights.changed(wholly=True) for _ in range(2)] == [True, False]
    pack(made[1], 3.0)
    watch.pause(weights, 2 * identity.PAUSE)
    assert weights.changed()


class Runner:
    """Like vLLM's runner, which has the model but reaches the connector through another object."""

    def get_model(self) -> str:
        return "the model"

    def start(self) -> Any:
        return Between().call()


class Between:
    """vLLM's V2 runner wraps its connector in its own object."""

    def call(self) -> Any:
        return running_model()


def test_the_model_is_that_of_the_runner_that_calls() -> None:
    assert Runner().start() == "the model"
    assert running_model() is None
