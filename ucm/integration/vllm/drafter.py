"""The proposer of `ucm.sparse.topk.drafts`: it drafts with the target's own weights, KV cache and block tables.

vLLM loads it by its name (``"method": "custom_class"``) and asks it for drafts after each step of the V1 runner. Each
draft is one forward of one token per request behind the request's newest token, as vLLM's own draft models run theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.clock import SYSTEM
from ucm.compat import draft_metadata
from ucm.errors import ConfigError
from ucm.integration.vllm.connector.failures import refusals_logged
from ucm.integration.vllm.hooks import worker_method
from ucm.integration.vllm.sparse.config import KEY, sparse_method_config
from ucm.sparse.factory import method_class
from ucm.sparse.topk.drafts import SparseDrafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class SparseDrafter:
    """Drafts with the target model under `SparseDrafts`.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        ConfigError: If the method is not configured: the drafts would be dense, and only cost time.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        with refusals_logged("UCM.Sparse"):
            configured = sparse_method_config(vllm_config)
            if configured is None or not issubclass(method_class(configured[0]), SparseDrafts):
                raise ConfigError(
                    f"{type(self).__name__} drafts under the method SparseDrafts, and "
                    + (f"{configured[0]} is configured" if configured else "no method is configured"),
                    where=f"speculative_config.model, {KEY}",
                    fix=f'configure {{"{KEY}": {{"SparseDrafts": {{}}}}}}, or start vLLM without this proposer',
                )

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing: the target drafts itself."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """Return drafts for each row of the step that has just run.

        Args:
            sampled_token_ids: The tokens that each row has generated; none while its prompt is computed.
            num_tokens_no_spec: ``[max_num_reqs]``: the tokens of each row, these included.
            token_ids_cpu: ``[max_num_reqs, max_model_len]``: these tokens.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        method = worker_method(self._config)
        runner = method.runner() if isinstance(method, SparseDrafts) else None
        if not isinstance(method, SparseDrafts) or runner is None:  # memory profiling
            return drafts
        rows = len(drafts)
        numbers = method.drafts(sampled_token_ids, num_tokens_no_spec[:rows], num_slots(runner, rows))
        if not numbers:
            return drafts
        began = SYSTEM.monotonic()
        forward = DraftForward(self._config, method)
        # Those with most drafts come first, so that each step runs those that are left.
        order = np.array(sorted(numbers, key=lambda row: -numbers[row]), np.int64)
        lens = num_tokens_no_spec[order].astype(np.int64)
        newest = forward.tokens(token_ids_cpu[order, lens - 1])
        for number in range(max(numbers.values())):
            left = sum(of > number for of in numbers.values())
            newest = forward.run(order[:left], lens[:left] - 1 + number, newest[:left], number)
            for row, token in zip(order.tolist(), newest.tolist(), strict=False):
                drafts[row].append(token)
        method.made(sum(numbers.values()), SYSTEM.monotonic() - began)
        return drafts


def num_slots(runner: Any, rows: int) -> NDArray[np.int64]:
    """Return ``[rows]``, int64: the tokens for whose KV each row of vLLM's batch has blocks, in every group.

    vLLM 0.22.1 reserves none behind a prompt that one step computes from its start.
    """
    tables = runner.input_batch.block_table.block_tables
    slots: NDArray[np.int64] = np.min(
        [table.num_blocks_per_row[:rows].astype(np.int64) * table.block_size for table in tables], 0
    )
    return slots


class DraftForward:
    """Runs the target on one token of each of some rows.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        method: The worker's method.
    """

    def __init__(self, vllm_config: Any, method: SparseDrafts) -> None:
        self._config, self._method = vllm_config, method
        self._runner = method.runner()

    def tokens(self, token_ids: NDArray[np.int32]) -> Any:
        """Return tokens on the device, int32."""
        import torch  # noqa: PLC0415 - vLLM brings it

        return torch.from_numpy(token_ids.astype(np.int32)).to(self._runner.device)

    def run(self, rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: Any, number: int) -> Any:
        """Compute tokens, write their KV, and return the most probable next ones.

        Args:
            rows: ``[n]``: the rows of the runner's batch.
            positions: ``[n]``: the positions of the tokens, behind which nothing is read.
            tokens: ``[n]``, int32, on the device.
            number: How many drafts these rows have.

        Returns:
            ``[n]``, int32, on the device.
        """
        from vllm.forward_context import set_forward_context  # noqa: PLC0415 - vLLM imports this module

        runner = self._runner
        metadata, slots, at = self._metadata(rows, positions, number)
        with (
            self._method.drafting(rows, positions),
            set_forward_context(metadata, self._config, num_tokens=len(rows), slot_mapping=slots),
        ):
            hidden = runner.model(input_ids=tokens, positions=at, intermediate_tensors=None, inputs_embeds=None)
        return runner.model.compute_logits(hidden).argmax(-1).int()

    def _metadata(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], number: int
    ) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Return the attention's metadata and the slots by layer, and the positions on the device."""
        import torch  # noqa: PLC0415 - as in `tokens`
        from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: PLC0415 - as in `run`

        runner, count = self._runner, len(rows)
        device = runner.device
        index, at = torch.from_numpy(rows).to(device), torch.from_numpy(positions).to(device)
        starts = torch.arange(count + 1, dtype=torch.int32)
        lens = torch.from_numpy((positions + 1).astype(np.int32))
        metadata: dict[str, Any] = {}
        slots: dict[str, Any] = {}
        for group, attention in enumerate(runner.attn_groups):
            table = runner.input_batch.block_table[group]
            blocks = table.get_device_tensor(runner.input_batch.num_reqs)[index]
            block = blocks.gather(1, (at // table.block_size)[:, None])[:, 0].long()
            slot = block * table.block_size + at % table.block_size
            common = CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=lens.to(device),
                seq_lens_cpu_upper_bound=lens,
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=int(lens.max()),
                block_table_tensor=blocks,
                slot_mapping=slot,
                positions=at,
                is_prefilling=torch.zeros(count, dtype=torch.bool),
            )
            for of in attention:
                built = draft_metadata(of, common, number)
                metadata |= dict.fromkeys(of.layer_names, built)
                slots |= dict.fromkeys(of.layer_names, slot)
        return metadata, slots, at
