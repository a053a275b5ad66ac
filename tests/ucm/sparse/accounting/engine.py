"""vLLM's own scheduler and KV-cache manager, with the method beside them, and a device that keeps no secrets.

Imported only where vLLM is.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.e2e.model import write_model
from tests.ucm.sparse.accounting.device import Device, following, marks

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable
    from pathlib import Path

    from ucm.sparse.sink_window import SinkWindow

LENGTH = 512
BLOCK = 4


@dataclass(frozen=True)
class Setting:
    """An engine.

    Args:
        options: The method's.
        asynchronous: Whether a step is scheduled before the outcome of the one before is known.
        caching: Whether prefixes are found again.
        blocks: Blocks of the KV cache, the null block among them.
        budget: Tokens per step.
        chunk: Most tokens of one request in a step; 0 for no limit of its own.
        running: Requests that run at once.
        crowded: Whether requests that were short when they were admitted come to want more blocks than there are.
        policy: Which request has to go when blocks run out: the latest, or the least important.
    """

    options: dict[str, Any] = field(default_factory=lambda: {"sink_tokens": 3, "window_tokens": 10})
    asynchronous: bool = False
    caching: bool = True
    blocks: int = 60
    budget: int = 24
    chunk: int = 0
    running: int = 6
    crowded: bool = False
    policy: str = "fcfs"


class Engine:
    """An engine that checks itself at every step.

    Args:
        setting: What it is like.
        directory: Where its model's configuration is.
        chance: Decides what is left open.
    """

    def __init__(self, setting: Setting, directory: Path, chance: random.Random) -> None:
        self.setting = setting
        self.chance = chance
        self.happened: Counter[str] = Counter()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        config = _configuration(setting, write_model(directory))
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=config.model_config.dtype)
        self.scheduler: Any = (AsyncScheduler if setting.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(setting.blocks, [], [KVCacheGroupSpec(["layer.0", "layer.1"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        self.method: SinkWindow = self.scheduler._ucm_sparse_method
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.pool = self.manager.block_pool
        self.device = Device(config, setting.options, setting.blocks, BLOCK)
        self.batches = 2 if setting.asynchronous else 1
        #: The steps in flight, each with the tokens of the requests that it resumes, and those whose outcome counts.
        self.in_flight: deque[tuple[Any, dict[str, list[int]], set[str]]] = deque()
        self.requests: dict[str, Any] = {}
        self.settled: set[str] = set()
        self._number = 0

    # From outside

    def submit(self, prompt: list[int], max_tokens: int) -> Any:
        """A new request."""
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        params.update_from_generation_config({}, 1)
        request = Request(
            f"{self._number}", prompt, params, None, block_hasher=self._hasher, priority=self.chance.randrange(3)
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Any) -> None:
        """A request's client has gone."""
        self._lose(request.request_id)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._collect()
        self.happened["aborts"] += 1

    def reset(self, *, running: bool) -> None:
        """Empty the prefix cache."""
        if running:
            for request in self.scheduler.running:
                self._lose(request.request_id)
        self.happened["resets"] += self.scheduler.reset_prefix_cache(reset_running_requests=running)

    def take_back(self, request: Any, num_tokens: int) -> None:
        """What vLLM's recovery does to a running request when a connector tells that blocks failed to load."""
        request.num_computed_tokens = num_tokens
        self.happened["taken back"] += 1

    def schedule(self) -> None:
        """Plan a step; what it gives to requests may be written beside the device's stream at once."""
        before = {request.request_id: request.num_preemptions for request in self.requests.values()}
        output = self.scheduler.schedule()
        for request_id, count in before.items():
            if self.requests[request_id].num_preemptions > count:
                self._lose(request_id)
                self.happened["preemptions"] += 1
        self._check_blocks()
        self._check_bounds(output.num_scheduled_tokens)
        self.device.scribble(self._fresh(output))
        resumed = {i: list(self.requests[i].all_token_ids) for i in output.scheduled_cached_reqs.resumed_req_ids}
        self.in_flight.append((output, resumed, set(output.num_scheduled_tokens)))
        self.happened["steps"] += 1
        self.happened["chunks"] += any(n > 1 for n in output.num_scheduled_tokens.values())
        self.happened["hits"] += sum(data.num_computed_tokens > 0 for data in output.scheduled_new_reqs)

    def execute(self) -> None:
        """Run the oldest step in flight, and tell the scheduler what came of it."""
        output, resumed, alive = self.in_flight.popleft()
        sampled = self.device.run(output, resumed, alive)
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[sampled.get(request_id, []) for request_id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
        )
        self.scheduler.update_from_output(output, result)
        self.settled |= alive
        self._collect()

    def turn(self) -> None:
        """One turn of the engine's loop: as many steps in flight as it may have."""
        if len(self.in_flight) < self.batches and self.scheduler.has_requests():
            self.schedule()
            if len(self.in_flight) < self.batches and self.chance.random() < 0.8:
                return
        if self.in_flight:
            self.execute()

    def drain(self) -> None:
        """Until all have ended, and nothing is left of them."""
        turns = 0
        while self.scheduler.has_requests() or self.in_flight:
            self.turn()
            turns += 1
            assert turns < 5000, "the engine does not get on"
        assert not self.requests
        assert not self.manager.req_to_blocks
        assert not self.method._blocks._ends
        assert not self.method._blocks._asked
        assert self.pool.get_num_free_blocks() == self.setting.blocks - 1, "blocks are lost"
        self._check_blocks()

    def held(self, request: Any) -> int:
        """The blocks that a request holds."""
        return sum(not block.is_null for block in self.manager.req_to_blocks.get(request.request_id, ()))

    # Within

    def _lose(self, request_id: str) -> None:
        """What steps in flight compute for a request no longer counts, and its first step is to come again."""
        for _, _, alive in self.in_flight:
            alive.discard(request_id)
        self.settled.discard(request_id)

    def _collect(self) -> None:
        for request_id in [i for i, request in self.requests.items() if request.is_finished()]:
            request = self.requests.pop(request_id)
            self.settled.discard(request_id)
            self.happened["finished"] += 1
            tokens = list(request.prompt_token_ids)
            for token in request.output_token_ids:
                assert token == following(marks(tokens)[-1])
                tokens.append(token)

    def _fresh(self, output: Any) -> list[int]:
        """The blocks that the step's requests were given, without those of a hit."""
        found = []
        for data in output.scheduled_new_reqs:
            found += data.block_ids[0][data.num_computed_tokens // BLOCK :]
        cached = output.scheduled_cached_reqs
        for request_id, new, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if new:
                found += new[0][computed // BLOCK :] if request_id in cached.resumed_req_ids else new[0]
        return found

    def _check_blocks(self) -> None:
        """Every block is held by as many requests as it says, or free once."""
        holders: Counter[int] = Counter()
        for row in self.manager.req_to_blocks.values():
            held = [block.block_id for block in row if not block.is_null]
            assert len(held) == len(set(held)), "a request holds a block twice"
            holders.update(held)
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == self.pool.get_num_free_blocks(), "a block was freed twice"
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == holders[block.block_id], "a block does not know who holds it"
                assert (block.ref_cnt == 0) == (block.block_id in set(free))

    def _check_bounds(self, scheduled: Iterable[str]) -> None:
        """No request holds more than sinks, window and the tokens in flight, once its first step has gone well."""
        most = self.method.window.most_blocks(self.batches * self.setting.budget, BLOCK)
        for request_id in self.settled.intersection(scheduled):
            if not self.method.window.dense_prefill:
                held = self.held(self.requests[request_id])
                assert held <= most, f"request {request_id} holds {held} blocks"
                self.happened["most held"] = max(self.happened["most held"], held)
            row = self.manager.req_to_blocks[request_id]
            self.happened["longest row"] = max(self.happened["longest row"], len(row))


def _configuration(setting: Setting, model: Path) -> Any:
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=LENGTH),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setting.running,
            max_num_batched_tokens=setting.budget,
            max_model_len=LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            long_prefill_token_threshold=setting.chunk,
            policy=setting.policy,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=setting.caching),
        parallel_config=ParallelConfig(),
        additional_config={"ucm_sparse_config": {"ucm.sparse.sink_window:SinkWindow": setting.options}},
    )
    config.scheduler_config.async_scheduling = setting.asynchronous  # on the CPU vLLM turns it off
    config.cache_config.num_gpu_blocks = setting.blocks
    return config
