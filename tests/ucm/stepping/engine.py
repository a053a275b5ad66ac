"""vLLM's own scheduler and KV-cache manager in an engine that checks itself; imported only where vLLM is."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from tests.ucm.stepping.vllm_objects import Requests, make_scheduler, runner_output

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from tests.ucm.stepping.setting import EngineSetting


class Device(Protocol):
    """One worker, which runs steps in the order of their scheduling."""

    def run(self, output: Any, resumed: Mapping[str, list[int]], alive: set[str]) -> Mapping[str, list[int]]:
        """Run a step.

        Args:
            output: vLLM's ``SchedulerOutput``.
            resumed: The tokens of the requests resumed after a preemption.
            alive: The requests whose results still count.

        Returns:
            The sampled token of each request whose known tokens are all computed.
        """


class CheckedEngine:
    """An engine that checks every step; a subclass provides its worker, ``device``.

    Args:
        setting: The engine's settings.
        config: vLLM's ``VllmConfig``.
        layers: The names of its layers.
        spec: vLLM's specification of their KV cache.
        chance: The source of random choices.
    """

    device: Device

    def __init__(
        self, setting: EngineSetting, config: Any, layers: Sequence[str], spec: Any, chance: random.Random
    ) -> None:
        self.chance = chance
        self.happened: Counter[str] = Counter()
        caches = KVCacheConfig(setting.blocks, [], [KVCacheGroupSpec(list(layers), spec)])
        self.scheduler = make_scheduler(config, caches)
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.pool = self.manager.block_pool
        self.batches = 2 if setting.asynchronous else 1
        #: The steps in flight, each with the tokens of the requests that it resumes, and those whose results count.
        self.in_flight: deque[tuple[Any, dict[str, list[int]], set[str]]] = deque()
        self.requests: dict[str, Any] = {}
        self._new = Requests(spec.block_size)
        self._blocks = setting.blocks

    # From outside

    def submit(self, prompt: Sequence[int], max_tokens: int, asked: object = None) -> Any:
        """Add a request, with a random priority."""
        request = self._new.make(prompt, max_tokens, self.chance.randrange(3), asked)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Any) -> None:
        """Abort a request, as if its client disconnected."""
        self._lose(request.request_id)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._collect()
        self.happened["aborts"] += 1

    def reset(self, *, running: bool = True) -> None:
        """Reset the prefix cache; running requests are preempted, or prevent the reset."""
        if running:
            for request in self.scheduler.running:
                self._lose(request.request_id)
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        assert done or not running
        self.happened["resets"] += done

    def schedule(self) -> None:
        """Schedule a step."""
        before = {request.request_id for request in self.scheduler.running}
        output = self.scheduler.schedule()
        # Not all schedulers count a request's preemptions.
        for request_id in before - {request.request_id for request in self.scheduler.running}:
            self._lose(request_id)
            self.happened["preemptions"] += 1
        self._check_blocks()
        self._scheduled(output)
        resumed = {i: list(self.requests[i].all_token_ids) for i in output.scheduled_cached_reqs.resumed_req_ids}
        self.in_flight.append((output, resumed, set(output.num_scheduled_tokens)))
        self.happened["steps"] += 1
        self.happened["resumed"] += len(resumed)
        self.happened["chunks"] += any(n > 1 for n in output.num_scheduled_tokens.values())
        self.happened["hits"] += sum(data.num_computed_tokens > 0 for data in output.scheduled_new_reqs)

    def execute(self) -> None:
        """Run the oldest step in flight, and pass its output to the scheduler."""
        output, resumed, alive = self.in_flight.popleft()
        sampled = self.device.run(output, resumed, alive)
        self.scheduler.update_from_output(output, runner_output(output, sampled))
        self._executed(alive)
        self._collect()

    def turn(self) -> None:
        """Run one iteration of the engine's loop, with as many steps in flight as allowed."""
        if len(self.in_flight) < self.batches and self.scheduler.has_requests():
            self.schedule()
            if len(self.in_flight) < self.batches and self.chance.random() < 0.8:
                return
        if self.in_flight:
            self.execute()

    def drain(self) -> None:
        """Run until all requests have ended, and check that nothing is left of them."""
        turns = 0
        while self.scheduler.has_requests() or self.in_flight:
            self.turn()
            turns += 1
            assert turns < 5000, "the engine does not get on"
        assert not self.requests
        assert not self.manager.req_to_blocks
        assert self.pool.get_num_free_blocks() == self._blocks - 1, "blocks are lost"
        self._check_blocks()

    # For subclasses to override

    def _scheduled(self, output: Any) -> None:
        """Called after a step was scheduled."""

    def _executed(self, alive: set[str]) -> None:
        """Called after a step was executed; its results count for these requests."""

    def _ended(self, request: Any) -> None:
        """Called after a request has finished or was aborted."""

    def _beside_row(self, request_id: str) -> list[int]:
        """Return the blocks that a request holds besides those of its row."""
        del request_id
        return []

    # Within

    def _lose(self, request_id: str) -> None:
        """Discard a request's results in flight; its next step counts as its first."""
        for _, _, alive in self.in_flight:
            alive.discard(request_id)

    def _collect(self) -> None:
        for request_id in [i for i, request in self.requests.items() if request.is_finished()]:
            self.happened["finished"] += 1
            self._ended(self.requests.pop(request_id))

    def _check_blocks(self) -> None:
        """Check that every block's reference count equals its holders, and that free blocks are listed once."""
        holders: Counter[int] = Counter()
        for request_id, row in self.manager.req_to_blocks.items():
            held = [block.block_id for block in row if not block.is_null] + self._beside_row(request_id)
            assert len(held) == len(set(held)), "a request holds a block twice"
            holders.update(held)
        listed = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        free = set(listed)
        assert len(listed) == len(free) == self.pool.get_num_free_blocks(), "a block was freed twice"
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == holders[block.block_id], "a block does not know who holds it"
                assert (block.ref_cnt == 0) == (block.block_id in free)
