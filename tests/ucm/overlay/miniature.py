"""A miniature vLLM: a few small modules at the real paths, written so that the real transforms apply to them.

An interpreter start with the real vLLM takes some twenty seconds and needs torch; the tests here start more than
a hundred interpreters. Their results (which file is found, in which process, with which message) do not depend on
what the modules compute. The end-to-end tests repeat them with the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: A release that vLLM will not publish soon; an unknown release tries every variant of every rule.
RELEASE = "0.99.0"
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ATTENTION = "vllm.model_executor.layers.attention.attention"
WORKER = "vllm.v1.worker.worker_base"

_DECODER = '''\
"""A decoder model in miniature."""


class {name}DecoderLayer:
    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class {name}Model:
    def forward(self, positions, hidden_states, residual):
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return hidden_states
'''

SOURCES = {
    "vllm/__init__.py": f'"""vLLM in miniature."""\n\n__version__ = "{RELEASE}"\n',
    "vllm/envs.py": "VLLM_PLUGINS = None\n",
    "vllm/v1/core/sched/scheduler.py": '''\
"""A scheduler in miniature."""

from enum import Enum, auto
from types import SimpleNamespace

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput


class RequestStatus(Enum):
    PREEMPTED = auto()


class Scheduler:
    def __init__(self):
        self.vllm_config = SimpleNamespace(kv_transfer_config=None, additional_config=None)
        self.kv_cache_manager = KVCacheManager()
        self.requests, self.running, self.waiting = {}, [], []

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self):
        num_new_tokens, req_index = 1, 0
        while req_index < len(self.running):
            request = self.running[req_index]
            if hasattr(request, "num_tokens"):
                num_new_tokens = (
                    request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
                )
            self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            req_index += 1
        while self.waiting:
            request, num_computed_tokens = self.waiting[0], 0
            if hasattr(request, "num_tokens"):
                num_new_tokens = request.num_tokens - num_computed_tokens
            self.kv_cache_manager.allocate_slots(self.waiting[0], num_new_tokens)
            self.running.append(self.waiting.pop(0))
        scheduler_output = SchedulerOutput(total=len(self.running))
        return scheduler_output

    def _preempt_request(self, request):
        request.status = RequestStatus.PREEMPTED

    def _free_request(self, request):
        del self.requests[request.request_id]

    def fail(self):
        raise RuntimeError("on purpose")
''',
    "vllm/v1/core/sched/output.py": '''\
"""A step in miniature."""

from dataclasses import dataclass


@dataclass
class SchedulerOutput:
    total: int
''',
    "vllm/v1/core/kv_cache_manager.py": '''\
"""A KV-cache manager in miniature."""


class KVCacheManager:
    def allocate_slots(self, request, num_new_tokens):
        return [num_new_tokens]
''',
    "vllm/v1/engine/core.py": '''\
"""EngineCore in miniature."""


def init_none_hash(hash_fn):
    pass


class EngineCore:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        caching_hash_fn = hash
        init_none_hash(caching_hash_fn)
        self.hash_function = caching_hash_fn

    def _initialize_kv_caches(self, vllm_config):
        kv_cache_specs = self.model_executor.get_kv_cache_specs()
        available_gpu_memory = self.model_executor.determine_available_memory()
        assert len(kv_cache_specs) == len(available_gpu_memory)
        return available_gpu_memory
''',
    "vllm/model_executor/layers/attention/attention.py": '''\
"""Attention operators in miniature."""


def unified_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping, layer_name):
    attn_layer.impl.do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)


def unified_attention_with_output(self, query, key, value, kv_cache, attn_metadata, output, layer_name):
    self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output=output)
''',
    "vllm/model_executor/layers/attention/mla_attention.py": '''\
"""Multi-head latent attention in miniature."""


class MLAAttention:
    def forward_impl(self, q, num_mqa_tokens, num_mha_tokens, kv_cache, attn_metadata, output):
        if num_mha_tokens > 0:
            self.impl.forward_mha(q, kv_cache, attn_metadata, output=output[num_mqa_tokens:])
        if num_mqa_tokens > 0:
            mqa_q = q[:num_mqa_tokens]
            attn_out, lse = self.impl.forward_mqa(mqa_q, kv_cache, attn_metadata, self)
        return output


def unified_mla_attention_with_output(layer, q, kv_c_normed, k_pe, kv_cache, attn_metadata, output, layer_name):
    layer.forward_impl(q, kv_c_normed, k_pe, kv_cache, attn_metadata, output=output)
''',
    "vllm/v1/worker/worker_base.py": '''\
"""The wrapper of a worker in miniature."""


class WorkerWrapperBase:
    def init_device(self):
        self.worker.init_device()
''',
    "vllm/v1/worker/gpu_model_runner.py": '''\
"""The V1 model runner in miniature."""


class GPUModelRunner:
    def _update_states(self, scheduler_output):
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        for req_index, (req_id, new_block_ids) in enumerate(scheduler_output.cached):
            if new_block_ids is not None:
                self.input_batch.block_table.append_row(new_block_ids, req_index)

    def execute_model(self, scheduler_output):
        with self.context():
            model_output = self._model_forward(scheduler_output)
        return model_output
''',
    "vllm/v1/worker/block_table.py": '''\
"""Block tables in miniature."""


class BlockTable:
    def add_row(self, block_ids, row_idx):
        self.rows[row_idx] = block_ids

    def clear_row(self, row_idx):
        self.rows[row_idx] = []


class MultiGroupBlockTable:
    def add_row(self, block_ids, row_idx):
        self.tables[0].add_row(block_ids, row_idx)

    def clear_row(self, row_idx):
        self.tables[0].clear_row(row_idx)
''',
    "vllm/v1/worker/gpu/model_runner.py": '''\
"""The V2 model runner in miniature."""


class GPUModelRunner:
    def finish_requests(self, scheduler_output):
        self.states.remove(scheduler_output)

    def add_requests(self, scheduler_output):
        self.states.add(scheduler_output)

    def update_requests(self, scheduler_output):
        self.states.update(scheduler_output)

    def execute_model(self, scheduler_output, dummy_run):
        input_batch = self.prepare(scheduler_output)
        if self.full:
            out = self.cudagraph_manager.run_fullgraph(input_batch)
        else:
            out = self.model(input_batch)
        return out
''',
    "vllm/v1/worker/gpu/block_table.py": '''\
"""The V2 block tables in miniature."""


class BlockTables:
    def append_block_ids(self, req_index, new_block_ids, overwrite):
        self.rows.write(req_index, new_block_ids, overwrite)
''',
    "vllm/model_executor/models/llama.py": _DECODER.format(name="Llama"),
    "vllm/model_executor/models/qwen2.py": _DECODER.format(name="Qwen2"),
    "vllm/model_executor/models/qwen3.py": _DECODER.format(name="Qwen3"),
    "vllm/model_executor/models/qwen3_moe.py": _DECODER.format(name="Qwen3Moe"),
}


def write_miniature(root: Path, release: str = RELEASE, sources: dict[str, str] | None = None) -> Path:
    """Write the package and its metadata below a directory; return that directory."""
    for path, text in (SOURCES if sources is None else sources).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(LICENCE + text, encoding="utf-8")
        for package in target.parents:
            if package == root:
                break
            (package / "__init__.py").touch()
    info = root / f"vllm-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n", encoding="utf-8")
    return root
