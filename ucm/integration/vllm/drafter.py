"""prototype"""
from __future__ import annotations
import numpy as np
import time, os, atexit
from ucm.integration.vllm.hooks import worker_method
T = {"draft": 0.0, "n": 0, "tokens": 0, "steps": 0, "accepted": 0, "drafted": 0, "fwd": 0.0, "meta": 0.0, "logits": 0.0}


class SparseDrafter:
    def __init__(self, vllm_config):
        self._config = vllm_config
        self._k = int(vllm_config.speculative_config.num_speculative_tokens)

    def load_model(self, *_, **__):
        pass

    def propose(self, sampled, num_tokens, token_ids, **_):
        import torch
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata
        t0 = time.perf_counter()
        method = worker_method(self._config)
        runner = method.runner()
        drafts = [[] for _ in sampled]
        want = method.drafts(sampled, num_tokens); rows = list(want); depth = max(want.values(), default=0)
        for r in rows:
            T["steps"] += 1; T["tokens"] += len(sampled[r])
        if not rows:
            return drafts
        tables = runner.input_batch.block_table
        groups = runner.kv_cache_config.kv_cache_groups
        n = len(rows)
        device = runner.device
        starts = torch.arange(n + 1, dtype=torch.int32)
        own = torch.tensor(rows, device=device)
        lens = np.array([int(num_tokens[r]) for r in rows], np.int64)
        ids = torch.from_numpy(token_ids[rows, lens - 1].astype(np.int32)).to(device)
        blocks = [tables[g].block_table.gpu[own] for g in range(len(groups))]
        found = []
        for i in range(depth):
            t1 = time.perf_counter()
            computed = lens - 1 + i
            positions = torch.from_numpy(computed).to(device)
            seq_lens = torch.from_numpy((computed + 1).astype(np.int32))
            per_layer, slots_by_layer = {}, {}
            for g, group in enumerate(groups):
                size = tables[g].block_size
                slots = blocks[g].gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size
                common = CommonAttentionMetadata(
                    query_start_loc=starts.to(device), query_start_loc_cpu=starts, seq_lens=seq_lens.to(device),
                    num_reqs=n, num_actual_tokens=n, max_query_len=1, max_seq_len=int(computed.max()) + 1,
                    block_table_tensor=blocks[g], slot_mapping=slots, causal=True, positions=positions,
                    seq_lens_cpu_upper_bound=seq_lens, is_prefilling=torch.zeros(n, dtype=torch.bool))
                for one in runner.attn_groups[g]:
                    built = one.get_metadata_builder().build_for_drafting(common, i)
                    for name in one.layer_names:
                        per_layer[name] = built
                        slots_by_layer[name] = slots
            t2 = time.perf_counter()
            with method.drafting(rows, computed):
                with set_forward_context(per_layer, self._config, num_tokens=n, slot_mapping=slots_by_layer):
                    hidden = runner.model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
                t3 = time.perf_counter()
                ids = runner.model.compute_logits(hidden).argmax(-1).int()
            t4 = time.perf_counter()
            T["meta"] += t2 - t1; T["fwd"] += t3 - t2; T["logits"] += t4 - t3
            found.append(ids)
        out = torch.stack(found, 1).tolist()
        for r, d in zip(rows, out):
            drafts[r] = d[:want[r]]
        method.made(sum(want.values()), time.perf_counter() - t0)
        T["draft"] += time.perf_counter() - t0; T["n"] += 1
        return drafts
