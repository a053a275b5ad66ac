"""Block top-k through random schedules of vLLM's own scheduler: nothing is stale, and no row reads another's blocks.

The scheduler, its KV-cache manager, our reading of its steps and the method are the real ones; the model is a rule that
makes keys and the next token from all tokens before. `CheckedTopK` compares what is kept of blocks with their keys, in
every layer of every sparse step.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

import torch
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

from tests.e2e.inside.checked_topk import INJECTED, CheckedTopK
from tests.e2e.model import write_model
from tests.ucm.sparse.fake_view import FakeView, Metadata
from ucm.integration.vllm.sparse.step import step_batch
from ucm.sparse.base import Role

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.sparse.attention import StepBatch
    from ucm.sparse.selection import StepPlan

SIZE, BLOCKS, KV_HEADS, HEADS, HEAD, LENGTH = 4, 70, 1, 2, 4, 512
LAYERS = [f"model.layers.{n}.attn" for n in (2, 3)]
OPTIONS = {"token_budget": 20, "sink_tokens": 2, "recent_tokens": 3, "dense_layers": 0}


class View(FakeView):
    """With our own reading of vLLM's steps."""

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        found = step_batch(runner, scheduler_output, input_batch)
        self.steps.append(found)
        return found


class Strict(CheckedTopK):
    """Lets a failure that is not on purpose fail the test."""

    def _fail(self, plan: StepPlan, layer_name: str, error: Exception) -> None:
        if str(error) != INJECTED:
            raise error
        super()._fail(plan, layer_name, error)


def mark_of(tokens: list[int]) -> int:
    mark = 1
    for token in tokens:
        mark = (mark * 1_000_003 + token * 8_191 + 12_345) % (1 << 61)
    return mark


class Worker:
    """A V1 runner's state, a KV cache of one shape for all layers, and the method on it."""

    def __init__(self, config: Any) -> None:
        self.method = Strict(config, Role.WORKER, OPTIONS)
        self.method.attention = View()
        self.method.worker_started()
        self.cache = torch.zeros((2, BLOCKS, SIZE, KV_HEADS, HEAD))
        self.rows: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}

    def run(self, output: Any, resumed: dict[str, list[int]]) -> dict[str, list[int]]:
        """Write the step's keys, let the method choose in all layers, and give the next tokens."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        self.method.requests_finished(None, output.finished_req_ids)
        starts = self._update(output)
        self.tokens |= {request_id: list(tokens) for request_id, tokens in resumed.items()}
        ids = list(output.num_scheduled_tokens)
        if not ids:
            return {}
        counts = [output.num_scheduled_tokens[i] for i in ids]
        for request_id, count in zip(ids, counts, strict=True):
            for place in range(starts[request_id], starts[request_id] + count):
                chance = np.random.default_rng(mark_of(self.tokens[request_id][: place + 1]))
                keys = torch.from_numpy(chance.standard_normal((KV_HEADS, HEAD))).float()
                self.cache[0, self.rows[request_id][place // SIZE], place % SIZE] = keys
        self._attend(ids, [starts[i] for i in ids], counts, output)
        sampled = {}
        for request_id, count in zip(ids, counts, strict=True):
            tokens = self.tokens[request_id]
            if starts[request_id] + count == len(tokens):
                tokens.append(1 + mark_of(tokens) % 5)
                sampled[request_id] = [tokens[-1]]
        return sampled

    def _update(self, output: Any) -> dict[str, int]:
        starts = {}
        for data in output.scheduled_new_reqs:
            self.rows[data.req_id] = list(data.block_ids[0])
            self.tokens[data.req_id] = list(data.prompt_token_ids)
            self.prompts[data.req_id] = len(data.prompt_token_ids)
            starts[data.req_id] = data.num_computed_tokens
        cached = output.scheduled_cached_reqs
        told = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new, computed in told:
            row = [] if request_id in cached.resumed_req_ids else self.rows[request_id]
            self.rows[request_id] = row + (list(new[0]) if new else [])
            starts[request_id] = computed
        return starts

    def _attend(self, ids: list[str], starts: list[int], counts: list[int], output: Any) -> None:
        table = torch.zeros(len(ids), max(len(self.rows[i]) for i in ids), dtype=torch.int32)
        for row, request_id in enumerate(ids):
            table[row, : len(self.rows[request_id])] = torch.tensor(self.rows[request_id])
        lens = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)], dtype=torch.int32)
        dense = Metadata(table, lens, int(lens.max()))
        batch = SimpleNamespace(
            req_ids=ids,
            num_computed_tokens_cpu=np.array(starts),
            num_prompt_tokens=np.array([self.prompts[i] for i in ids]),
        )
        query = torch.randn((sum(counts), HEADS, HEAD))
        self.method.execute_begin(None, output, batch)
        for name in LAYERS:
            self.method.attention_begin(name, query, query, query, self.cache, dense)
        self.method.execute_finished(None, output, None)


class Engine:
    """vLLM's scheduler with a worker behind it; with asynchronous scheduling, one step ahead of it."""

    def __init__(self, directory: Path, *, asynchronous: bool) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        config = _configuration(write_model(directory), asynchronous=asynchronous)
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.float32)
        self.scheduler: Any = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(LAYERS, spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=SIZE,
            log_stats=False,
        )
        self.worker = Worker(config)
        self.requests: dict[str, Any] = {}
        self.happened: Counter[str] = Counter()
        self._ahead = 2 if asynchronous else 1
        self._in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        params.update_from_generation_config({}, 1)
        request = Request(f"{number}", prompt, params, None, block_hasher=self._hasher)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)

    def turn(self) -> None:
        while len(self._in_flight) < self._ahead and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            back = output.scheduled_cached_reqs.resumed_req_ids
            self.happened["resumed"] += len(back)
            self.happened["hits"] += sum(data.num_computed_tokens > 0 for data in output.scheduled_new_reqs)
            self.happened["chunks"] += any(n > 1 for n in output.num_scheduled_tokens.values())
            self._in_flight.append((output, {i: list(self.requests[i].all_token_ids) for i in back}))
        if not self._in_flight:
            return
        output, resumed = self._in_flight.popleft()
        sampled = self.worker.run(output, resumed)
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[sampled.get(request_id, []) for request_id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
        )
        self.scheduler.update_from_output(output, result)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.happened["aborts"] += 1

    @property
    def alive(self) -> list[str]:
        return [request_id for request_id, request in self.requests.items() if not request.is_finished()]


def _configuration(model: Path, *, asynchronous: bool) -> Any:
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=LENGTH),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=SIZE, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
    )
    config.scheduler_config.async_scheduling = asynchronous  # on the CPU vLLM turns it off
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_stale_whatever_is_scheduled(tmp_path: Path, seed: int, *, asynchronous: bool) -> None:
    """Prefix hits, chunks, preemptions, aborts and resets of the prefix cache; some steps fail on purpose."""
    chance = random.Random(seed)  # noqa: S311 - no secrets
    engine = Engine(tmp_path, asynchronous=asynchronous)
    prefixes = [[chance.randrange(5) for _ in range(n)] for n in (17, 40)]
    number = 0
    for _ in range(350):
        if len(engine.alive) < 9 and chance.random() < 0.3:
            prompt = chance.choice([[], *prefixes]) + [chance.randrange(5) for _ in range(chance.randrange(1, 30))]
            engine.submit(number, prompt, chance.randrange(1, 60))
            number += 1
        if engine.alive and chance.random() < 0.02:
            engine.abort(chance.choice(engine.alive))
        if chance.random() < 0.01:
            engine.happened["resets"] += engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.turn()
    counts = engine.worker.method.counts
    assert {"resumed", "hits", "chunks", "aborts"} <= {name for name, count in engine.happened.items() if count}
    assert counts["rows"] > 300
    assert counts["representatives"] > 100
    assert counts["failures"] == 3
    planner = engine.worker.method._planner
    assert planner is not None
    assert set(planner._made) | engine.worker.method._dense <= set(engine.alive), "nothing is kept of ended requests"
