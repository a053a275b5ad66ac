"""Block top-k that does all of its work, checks it against the KV cache, and then reads everything.

An engine with it must generate a dense engine's tokens, and its log reports stale representatives as failures. In
some steps it fails on purpose if it has a single rank: one of several ranks cannot be dense alone, and ends the engine.
"""

from __future__ import annotations

from typing import Any

from ucm.sparse.topk.method import BlockTopK

INJECTED = "a failure on purpose"
#: The numbers of the restricted steps that fail; the first restricted step does not.
FAILING = (20, 21, 60)


class CheckedTopK(BlockTopK):
    """See above; takes the same options."""

    def _restrict(self, plan: Any, layer_name: str, query: Any, kv_cache: Any, attn_metadata: Any) -> Any:
        import torch  # noqa: PLC0415

        if self.attention.ranks == 1 and self.counts["steps"] in FAILING and ".3." in layer_name:
            self.counts["steps"] += 1  # so that it is once, whatever else happens in this step
            raise RuntimeError(INJECTED)
        restricted = super()._restrict(plan, layer_name, query, kv_cache, attn_metadata)
        batch = self._batch
        assert batch is not None
        table = self.attention.block_table(attn_metadata)[: len(batch.request_ids)]
        self._check_representatives(plan, layer_name, kv_cache, table)
        self._check_rows(plan, restricted, table)
        lens = attn_metadata.seq_lens
        assert torch.equal(lens[: len(batch.request_ids)].cpu(), torch.from_numpy(batch.seq_lens).int())
        return self.attention.restricted(layer_name, attn_metadata, table.clone(), lens.clone(), int(lens.max()))

    def _check_representatives(self, plan: Any, layer_name: str, kv_cache: Any, table: Any) -> None:
        """Check that each candidate's representative matches its current keys."""
        import torch  # noqa: PLC0415

        made = self._representatives[layer_name]
        for row, blocks in zip(plan.pieces.rows[plan.rows].tolist(), plan.blocks.tolist(), strict=True):
            ids = table[row, plan.budget.sinks : blocks - plan.budget.recent].long()
            keys = self.attention.read_keys(layer_name, kv_cache, ids)
            now = type(made)(len(ids), keys[:1])
            now.put(torch.arange(len(ids)), keys)
            assert _same(made, now, ids), f"stale representatives in {layer_name}"

    def _check_rows(self, plan: Any, restricted: Any, table: Any) -> None:
        """Check that sparse rows read their own blocks in order, newest last, and dense rows all of theirs."""
        size = plan.budget.block_size
        sparse = set(plan.rows.tolist())
        for row, after in enumerate(plan.seq_lens.tolist()):
            before, of = int(plan.pieces.ends[row]), int(plan.pieces.rows[row])
            whole = table[of, : -(-before // size)].tolist()
            read = restricted.block_table[row, : -(-after // size)].tolist()
            places = [whole.index(block) for block in read]
            assert places == sorted(set(places))
            assert places[0] == 0
            assert places[-1] == len(whole) - 1
            assert len(read) == (plan.budget.total if row in sparse else len(whole))
            assert int(restricted.seq_lens[row]) == after


def _same(made: Any, now: Any, ids: Any) -> bool:
    """Return whether these are equal; one in a hundred bits of codes may differ, for projections near zero."""
    import torch  # noqa: PLC0415

    apart = (made._codes[:, ids] ^ now._codes)[..., None] >> torch.arange(64) & 1
    return bool(apart.float().mean() < 0.01) and torch.allclose(made._means[:, ids], now._means, rtol=0.02, atol=0.02)
