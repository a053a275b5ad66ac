"""Sparse drafts, dense verification: the model drafts its own next tokens under a budget, and verifies them densely.

Source: MagicDec (Chen et al., arXiv:2408.11049) and TriForce (Sun et al., COLM 2024, arXiv:2404.11912): with a long
context, a step of the model under a small budget is a cheap and good draft of what it says densely.

`BlockTopK` restricts the draft steps only. All other steps are dense, and compute again whatever a draft step has
written: that lies behind the tokens whose KV was computed densely, where the next step writes before it reads. So no KV
of a draft step is read densely, hashed, shared or saved, and answers are those of dense decoding.

`ucm.integration.vllm.drafter.SparseDrafter` makes the drafts, as vLLM's proposer; this module decides which, and what
their steps read.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import numpy as np
from pydantic import Field

from ucm.clock import SYSTEM
from ucm.compat import drafts_spoil_sampling, optional
from ucm.sparse.attention import StepBatch
from ucm.sparse.base import refuse
from ucm.sparse.topk.method import BlockTopK, BlockTopKOptions
from ucm.sparse.topk.payoff import Payoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.base import Role
    from ucm.sparse.topk.selection import RestrictedTables, SelectionPlan, SelectionPlanner

#: vLLM's kind of proposers that are loaded by their class, and ours.
CUSTOM, DRAFTER = "custom_class", "ucm.integration.vllm.drafter.SparseDrafter"
HOW = f'--speculative-config \'{{"method": "{CUSTOM}", "model": "{DRAFTER}", "num_speculative_tokens": 4}}\''
WITHOUT = "start vLLM without it, or without ucm_sparse_config and --speculative-config"
#: What a draft step would have to prepare beside its tokens, or to agree on with other ranks, and where it is set.
UNSERVED = {
    "several ranks": "parallel_config.world_size",
    "data parallelism": "parallel_config.data_parallel_size",
    "a rebalancing of experts": "parallel_config.enable_eplb",
    "LoRA adapters": "lora_config",
    "models with other inputs than text": "model_config.is_multimodal_model",
    "positions of several dimensions": "model_config.uses_mrope",
    "prompts of embeddings": "model_config.enable_prompt_embeds",
}


class SparseDraftsOptions(BlockTopKOptions):
    """The options of `BlockTopK`, and when to draft.

    Attributes:
        drafting: ``measured`` drafts as many tokens as pay, by the measured time of steps and the drafts that were
            accepted; ``always`` drafts as many as vLLM allows.
    """

    drafting: Literal["measured", "always"] = Field(default="measured", description="`measured` or `always`")


@dataclass(eq=False)
class Chosen:
    """The blocks that the first drafts after a step read; those behind them read the same ones.

    Attributes:
        plan: What these drafts read.
        tables: As `BlockTopK` keeps them within a step.
        by_layer: The block table of each restricted layer.
        lens: ``[n]``, int32: the tokens that the running draft step reads of each row.
    """

    plan: SelectionPlan
    tables: RestrictedTables
    by_layer: dict[str, Tensor]
    lens: Tensor

    def serves(self, plan: SelectionPlan) -> bool:
        """Return whether further drafts may read the same blocks: of the same rows, up to the same newest blocks."""
        sparse = all(len(of.rows) == len(of.seq_lens) for of in (self.plan, plan))
        return sparse and self.plan.request_ids == plan.request_ids and np.array_equal(self.plan.blocks, plan.blocks)


class SparseDrafts(BlockTopK):
    """Restricts the steps that draft; see the module.

    Attributes:
        counts: As of `BlockTopK`, of draft steps; and ``drafted`` and ``accepted`` tokens.
        runner: The model runner, by a weak reference, from its first step on.
    """

    options_type = SparseDraftsOptions
    _options: SparseDraftsOptions
    needed_hooks = ("ATTENTION", "SCHEDULER", "WORKER", "MODEL_RUNNER")
    serves_latent = False
    serves_hybrids = False

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self.runner: Callable[[], Any] = lambda: None
        self._longest = int(optional(vllm_config, "model_config.max_model_len") or sys.maxsize)
        self._most = int(optional(vllm_config, "speculative_config.num_speculative_tokens") or 0)
        self._greedy_only = drafts_spoil_sampling(vllm_config)
        self._sampling: bool | None = False  #: whether any request does; on the scheduler's side None: to be found out
        self._requests: Mapping[str, Any] = {}  #: the scheduler's
        self._payoff = Payoff(self._most, SYSTEM.monotonic, always=self._options.drafting == "always")
        self._step: StepBatch | None = None  #: the engine's running step
        self._made: Mapping[str, int] = {}  #: the drafts that were made before it
        self._drafting = False
        self._chosen: Chosen | None = None  #: by the first drafts after the running step

    @classmethod
    def lasting_tokens(cls, options: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """Return that all tokens are computed densely."""
        del options, num_prompt_tokens
        return sys.maxsize

    @classmethod
    def advice(cls, options: Mapping[str, Any]) -> list[str]:
        """Return how vLLM must be started."""
        return [*super().advice(options), f"it drafts only if vLLM is started with {HOW}"]

    def limit_new_tokens(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Where they would spoil it, let no step verify drafts while a request samples."""
        if self._sampling is None:
            params = [one.sampling_params for one in self._requests.values()]
            self._sampling = any(of is not None and of.temperature > 0 for of in params)
        return min(num_new_tokens, request.num_tokens - num_computed_tokens) if self._sampling else num_new_tokens

    def build_metadata(self, scheduler_output: Any) -> object:
        """Send nothing; requests come and go between steps."""
        del scheduler_output
        self._sampling = None if self._greedy_only else False
        return None

    def before_allocation(self, request: Any) -> bool:
        """Leave all blocks to be shared."""
        del request
        return True

    def worker_started(self) -> None:
        """Refuse an engine that does not draft with `DRAFTER`, or whose forwards need more than a token per request."""
        speculative = optional(self.vllm_config, "speculative_config")
        proposer = optional(speculative, "method"), optional(speculative, "model")
        refuse(
            {"SparseDrafts restricts the drafts of its own proposer only": proposer != (CUSTOM, DRAFTER)},
            f"speculative_config: {proposer}",
            f"start vLLM with {HOW}, or without ucm_sparse_config",
        )
        for what, where in UNSERVED.items():
            found = optional(self.vllm_config, where)
            there = found is True or (found and found != 1)
            refuse({f"SparseDrafts does not serve {what}": there}, f"{where} = {found!r}"[:200], WITHOUT)
        if self._greedy_only:
            self._logger.info(
                "[UCM.Sparse] %s drafts nothing while a request samples (temperature): this vLLM would then give wrong "
                "tokens on a CPU",
                self._name,
            )
        super().worker_started()

    def scheduler_started(self, scheduler: Any) -> None:
        """Reserve slots for the KV of drafts, as vLLM does for draft models; refuse a connector that may save it.

        vLLM would also pad the first step of some requests with drafts that are none, for full CUDA graphs, unless the
        number of drafts depends on that of the requests.
        """
        connector = optional(scheduler, "connector")
        other = connector is not None and not type(connector).__module__.startswith("ucm.")
        refuse(
            {"a KV connector that is not UCM's may save the KV of drafts: it is told of their layers, too": other},
            f"kv_transfer_config: {type(connector).__name__}",
            "serve with UCM's connector, or without ucm_sparse_config and --speculative-config",
        )
        scheduler.num_lookahead_tokens = max(scheduler.num_lookahead_tokens, self._most)
        if optional(scheduler, "dynamic_sd_lookup", ()) is None:
            scheduler.dynamic_sd_lookup = [self._most] * (scheduler.max_num_running_reqs + 1)
        self._requests, self._sampling = scheduler.requests, None if self._greedy_only else False

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Drop the state of ended requests."""
        ended = list(request_ids)
        super().requests_finished(runner, ended)
        for request_id in ended:
            self._payoff.forget(request_id)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Note what the step verifies."""
        if self.runner() is None:
            self.runner = ref(runner)
            # Near the longest context vLLM replaces the drafts of all requests by zeros, which fails on a CPU; `drafts`
            # stops those of a request at its own end.
            runner.effective_drafter_max_model_len = sys.maxsize
        super().execute_begin(runner, scheduler_output, input_batch)
        self._step = batch = self._batch
        self._sampling = self._greedy_only and not input_batch.all_greedy
        if batch is not None:
            verified = {name: len(of) for name, of in scheduler_output.scheduled_spec_decode_tokens.items()}
            decodes = (batch.num_computed_tokens >= batch.num_prompt_tokens) & ~batch.admitted
            context = int(batch.num_computed_tokens.sum())
            self._payoff.begin(batch.request_ids, context, verified, decodes=bool(decodes.all()))

    def drafts(
        self, sampled: Sequence[Sequence[int]], num_tokens: NDArray[np.int32], num_slots: NDArray[np.int64]
    ) -> dict[int, int]:
        """Return how many drafts to make for which rows of the step that has just run.

        Args:
            sampled: The tokens that each row has generated.
            num_tokens: The tokens that it has, these included.
            num_slots: The tokens for whose KV it has blocks. The last draft of a step writes none.
        """
        step, planner, self._chosen = self._step, self._planner, None
        if step is None or planner is None:
            return {}
        chosen: dict[str, int] = {}
        left = np.minimum(self._longest, num_slots + 1) - num_tokens
        made, self._made = self._made, {}
        for row, new in enumerate(sampled):
            request_id = step.request_ids[row]
            if new and request_id in made:
                # Those that vLLM has not verified gained nothing either: a grammar, for instance, does not allow them.
                self.counts["drafted"] += made[request_id]
                self.counts["accepted"] += len(new) - 1
                self._payoff.judged(request_id, made[request_id], len(new) - 1)
            long = planner.most_dense(request_id) < num_tokens[row]
            if new and long and left[row] > 0 and request_id not in self._dense and not self._sampling:
                chosen[request_id] = row
        numbers = self._payoff.choose(list(chosen))
        self._made = {name: min(number, int(left[chosen[name]])) for name, number in numbers.items()}
        return {chosen[name]: number for name, number in self._made.items()}

    def made(self, drafts: int, seconds: float) -> None:
        """Drafts were made after a step."""
        self._payoff.made(drafts, seconds)

    @contextmanager
    def drafting(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Iterator[None]:
        """The model runs within this context to draft one token of each of some rows.

        Args:
            rows: ``[n]``: rows of the step that has just run.
            positions: ``[n]``: the positions of the tokens that it computes.
        """
        step = self._step
        if step is None:
            raise RuntimeError("drafts are made after a step")
        count = len(rows)
        batch = StepBatch(
            [step.request_ids[row] for row in rows.tolist()],
            np.ones(count, np.int64),
            positions,
            step.num_prompt_tokens[rows],
            np.zeros(count, np.bool_),
        )
        self._drafting = True
        try:
            self._begin(batch)
            yield
            self._finish()
        finally:
            self._drafting = False

    def summary(self) -> str:
        """Return the counters so far, in one line."""
        return f"{super().summary()}; {self.counts['accepted']} of {self.counts['drafted']} drafts accepted"

    def _take_plan(self, planner: SelectionPlanner, batch: StepBatch) -> None:
        for request_id, asked in batch.asked.items():
            self._steer(planner, request_id, asked)
        self._missing = planner.missing(batch, self._dense)
        if self._drafting:
            self._plan = plan = planner.plan(batch, self._dense)
            first = self._chosen
            if plan is None or first is None or not first.serves(plan):
                self._chosen = None
            else:
                first.lens = first.tables.seq_lens + int(plan.seq_lens[0] - first.plan.seq_lens[0])

    def _choose(self, plan: SelectionPlan, layer_name: str, *of_layer: Any) -> tuple[Tensor, Tensor]:
        """Choose for the first drafts after a step; choosing for each one takes more time than it gains acceptance."""
        first = self._chosen
        if first is not None and layer_name in first.by_layer:
            self._tables = of_layer[-1], first.tables
            return first.by_layer[layer_name], first.lens
        table, lens = super()._choose(plan, layer_name, *of_layer)
        if first is None and self._tables is not None:
            self._chosen = first = Chosen(plan, self._tables[1], {}, lens)
        if first is not None:
            first.by_layer[layer_name] = table
        return table, lens
