"""Block top-k on latent attention that checks each restricted layer, and records how much attention choices keep.

The queries by which it chooses must be those that vLLM multiplies with the cache, and the output of vLLM's kernel must
be attention in 64 bits over the tokens of the chosen blocks. Its file, named by ``LATENT_SHARES``, has a line for each
restricted layer of a step: the number of compared rows, how many of them read less than their context, and for each
selector the mean share over heads and rows of the attention to the candidate blocks that the chosen ones have.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ucm.sparse.topk.method import BlockTopK


class Restricted(NamedTuple):
    """A restricted layer whose decodes have not run yet."""

    layer_name: str
    wanted: Any  #: the queries by which blocks were chosen
    dense: Any  #: the metadata before
    line: dict[str, float]


class LatentShares(BlockTopK):
    """See above; takes the same options."""

    _restricted_layer: Restricted | None = None
    _decodes: tuple[Any, Any, Any] | None = None  #: queries, cache and metadata of the running decodes

    def _restrict(self, plan: Any, layer_name: str, query: Any, kv_cache: Any, attn_metadata: Any) -> Any:
        import torch  # noqa: PLC0415

        restricted = super()._restrict(plan, layer_name, query, kv_cache, attn_metadata)
        budget = plan.budget
        table = self.attention.block_table(attn_metadata)
        wanted = self.attention.scored(layer_name, query, attn_metadata)
        made = self._representatives[layer_name]
        found: dict[str, list[float]] = {"oracle": [], "hash": [], "mean": [], "random": []}
        for row, token, blocks in zip(plan.rows.tolist(), plan.tokens.tolist(), plan.blocks.tolist(), strict=True):
            ids = table[row, budget.sinks : blocks - budget.recent].long()
            keys = self.attention.read_keys(layer_name, kv_cache, ids)[:, :, 0].double()
            scores = torch.einsum("hd,bsd->hbs", wanted[token].double(), keys) * keys.shape[-1] ** -0.5
            mass = scores.flatten(1).softmax(-1).view_as(scores).sum(-1)  # [num_heads, blocks]
            means = torch.einsum("hd,bd->hb", wanted[token].double(), keys.mean(1)) * keys.shape[-1] ** -0.5
            ranks = {
                "oracle": mass.sum(0),
                "hash": made.shares(wanted[token : token + 1], ids[None], None)[0].double(),
                "mean": means.softmax(-1).sum(0),
                "random": torch.rand(len(ids), generator=torch.Generator().manual_seed(blocks)),
            }
            for name, rank in ranks.items():
                found[name].append(float(mass[:, rank.topk(budget.chosen).indices].sum(-1).mean()))
            read = restricted.decode.block_table[row].tolist()
            ours = ids[ranks["hash"].topk(budget.chosen).indices].tolist()
            assert set(ours) <= set(read), "it reads what it ranks highest"
        line = {name: sum(of) / len(of) for name, of in found.items()}
        self._restricted_layer = Restricted(layer_name, wanted, attn_metadata, line)
        return restricted

    def mla_begin(self, layer: Any, phase: str, query: Any, kv_cache: Any, attn_metadata: Any) -> Any:
        """Compare vLLM's own absorbed queries with those that chose."""
        import torch  # noqa: PLC0415

        if phase == "decode":
            own = torch.cat(query, -1) if isinstance(query, tuple) else query
            self._decodes = own, kv_cache, attn_metadata
            of = self._restricted_layer
            if of is not None and of.layer_name == layer.layer_name:
                torch.testing.assert_close(of.wanted, own * (layer.impl.scale * own.shape[-1] ** 0.5))
        return attn_metadata

    def mla_finished(self, layer: Any, phase: str, output: Any) -> None:
        """Compare the output of each decode with attention over what it reads, and write the layer's line."""
        import torch  # noqa: PLC0415

        of, decodes = self._restricted_layer, self._decodes
        if phase != "decode" or of is None or of.layer_name != layer.layer_name:
            return
        assert decodes is not None
        query, kv_cache, used = decodes
        lens = used.decode.seq_lens.tolist()
        for row, length in enumerate(lens):
            ids = used.decode.block_table[row, : -(-length // kv_cache.shape[1])].long()
            keys = kv_cache[ids].flatten(0, 1)[:length].double()
            weights = (query[row].double() @ keys.T * layer.impl.scale).softmax(-1)
            wanted = weights @ keys[:, : output.shape[-1]]
            torch.testing.assert_close(output[row].double(), wanted, rtol=0, atol=5e-5)
        fewer = sum(now < before for now, before in zip(lens, of.dense.decode.seq_lens.tolist(), strict=True))
        with Path(os.environ["LATENT_SHARES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"rows": len(lens), "fewer": fewer, **of.line}) + "\n")
        self._restricted_layer = self._decodes = None
