"""vLLM's own scheduler with ESA on both of its sides; imported only where vLLM is."""

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
from tests.ucm.sparse.esa_steps.toy import KV_HEADS, LAYERS, LENGTH, SIZE, Device
from ucm.sparse.base import Role
from ucm.sparse.factory import create_method

if TYPE_CHECKING:
    import random
    from pathlib import Path

BLOCK = 4


@dataclass(frozen=True)
class Setting:
    """An engine.

    Args:
        options: The method's, but for its store.
        at_once: Whether a middle is released from its first block on.
        asynchronous: Whether a step is scheduled before the outcome of the one before is known.
        caching: Whether prefixes are found again.
        blocks: Blocks of the KV cache, the null block among them.
        budget: Tokens per step.
        running: Requests that run at once.
    """

    options: dict[str, Any] = field(default_factory=lambda: {"token_budget": 16, "sink_tokens": 3, "window_tokens": 10})
    at_once: bool = False
    asynchronous: bool = False
    caching: bool = True
    blocks: int = 100
    budget: int = 24
    running: int = 6


class Engine:
    """An engine that checks itself at every step.

    Args:
        setting: What it is like.
        directory: For its model's configuration and its store.
        chance: Decides what is left open.
    """

    def __init__(self, setting: Setting, directory: Path, chance: random.Random) -> None:
        self.setting = setting
        self.chance = chance
        self.happened: Counter[str] = Counter()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.root = directory / "store"
        self.root.mkdir(mode=0o700)
        store = {"pipeline": "Posix", "directories": [str(self.root)]}
        self.options = {**setting.options, "store": store}
        name = "tests.e2e.inside.eager_esa:EagerESA" if setting.at_once else "ucm.sparse.esa:ESA"
        config = _configuration(setting, write_model(directory / "model"), {name: self.options})
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=config.model_config.dtype
        )
        names = [f"layer.{layer}" for layer in range(LAYERS)]
        self.scheduler: Any = (AsyncScheduler if setting.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(setting.blocks, [], [KVCacheGroupSpec(names, spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        self.method: Any = self.scheduler._ucm_sparse_method
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.pool = self.manager.block_pool
        self.worker: Any = create_method(name, config, Role.WORKER, self.options)
        always = self.options["sink_tokens"], self.options["window_tokens"]
        self.device = Device(self.worker, setting.blocks, BLOCK, always)
        self.batches = 2 if setting.asynchronous else 1
        #: The steps in flight, each with the tokens of the requests that it resumes, and those whose outcome counts.
        self.in_flight: deque[tuple[Any, dict[str, list[int]], set[str]]] = deque()
        self.requests: dict[str, Any] = {}
        #: Of each request that has ended by itself, its prompt and its answer.
        self.answers: dict[str, tuple[list[int], list[int]]] = {}
        #: The most blocks that a request with a middle has held, by the tokens that it had, in hundreds.
        self.held: Counter[int] = Counter()
        self._number = 0

    # From outside

    def submit(self, prompt: list[int], max_tokens: int) -> Any:
        """A new request."""
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        params.update_from_generation_config({}, 1)
        request = Request(f"{self._number}", prompt, params, None, block_hasher=self._hasher)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Any) -> None:
        """A request's client has gone."""
        self._lose(request.request_id)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.requests.pop(request.request_id)
        self.happened["aborts"] += 1

    def reset(self) -> None:
        """Empty the prefix cache; running requests start again."""
        for request in self.scheduler.running:
            self._lose(request.request_id)
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.happened["resets"] += 1

    def schedule(self) -> None:
        """Plan a step."""
        before = {request.request_id: request.num_preemptions for request in self.requests.values()}
        output = self.scheduler.schedule()
        for request_id, count in before.items():
            if self.requests[request_id].num_preemptions > count:
                self._lose(request_id)
                self.happened["preemptions"] += 1
        self._check_blocks()
        resumed = {i: list(self.requests[i].all_token_ids) for i in output.scheduled_cached_reqs.resumed_req_ids}
        self.in_flight.append((output, resumed, set(output.num_scheduled_tokens)))
        self.happened["steps"] += 1
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
        for request_id in [i for i, request in self.requests.items() if request.is_finished()]:
            request = self.requests.pop(request_id)
            self.answers[request_id] = list(request.prompt_token_ids), list(request.output_token_ids)

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
        assert not self.method._blocks._middles
        assert self.pool.get_num_free_blocks() == self.setting.blocks - 1, "blocks are lost"

    # Within

    def _lose(self, request_id: str) -> None:
        for _, _, alive in self.in_flight:
            alive.discard(request_id)

    def _check_blocks(self) -> None:
        """Every block is held by as many requests as it says, or free once; a resident one by its request alone."""
        holders: Counter[int] = Counter()
        middles = self.method._blocks._middles
        for request_id, row in self.manager.req_to_blocks.items():
            held = [block.block_id for block in row if not block.is_null]
            if request_id in middles:
                held += [block.block_id for block in middles[request_id].resident]
                tokens = self.requests[request_id].num_computed_tokens // 100
                self.held[tokens] = max(self.held[tokens], len(held))
            assert len(held) == len(set(held)), "a request holds a block twice"
            holders.update(held)
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        assert len(free) == self.pool.get_num_free_blocks(), "a block was freed twice"
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == holders[block.block_id], "a block does not know who holds it"
                assert (block.ref_cnt == 0) == (block.block_id in free)
        for middle in middles.values():
            for block in middle.resident:
                assert (block.ref_cnt, block.block_hash) == (1, None), "a resident block can be found by others"


def _configuration(setting: Setting, model: Path, method: dict[str, Any]) -> Any:
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=LENGTH),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setting.running,
            max_num_batched_tokens=setting.budget,
            max_model_len=LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=setting.caching),
        parallel_config=ParallelConfig(),
        additional_config={"ucm_sparse_config": method},
    )
    config.scheduler_config.async_scheduling = setting.asynchronous  # on the CPU vLLM turns it off
    config.cache_config.num_gpu_blocks = setting.blocks
    return config
