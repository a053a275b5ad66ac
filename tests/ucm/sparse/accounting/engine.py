"""vLLM's own scheduler and KV-cache manager with `SinkWindow`, and a device whose cache identifies its tokens.

Imported only where vLLM is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.ucm.sparse.accounting.device import LAYERS, Device, following, marks
from tests.ucm.stepping.engine import CheckedEngine
from tests.ucm.stepping.rows import fresh
from tests.ucm.stepping.setting import EngineSetting
from tests.ucm.stepping.vllm_objects import engine_config

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from ucm.sparse.sink_window import SinkWindow

LENGTH = 512
BLOCK = 4


@dataclass(frozen=True)
class Setting(EngineSetting):
    """An engine.

    Args:
        options: The method's options.
        crowded: Whether requests that were short at their admission grow to need more blocks than there are.
        dense: The share of requests that ask to be dense, 0 to 1.
    """

    options: dict[str, Any] = field(default_factory=lambda: {"sink_tokens": 3, "window_tokens": 10})
    crowded: bool = False
    dense: float = 0.0


class Engine(CheckedEngine):
    """An engine that checks in every step that no request holds too many blocks, and at the end that output is correct.

    Args:
        setting: The engine's setting.
        chance: The source of random choices.
    """

    def __init__(self, setting: Setting, chance: random.Random) -> None:
        self.setting = setting
        sparse = {"ucm_sparse_config": {"tests.ucm.sparse.accounting.device:SmallTiles": setting.options}}
        config = engine_config(write_model(MODEL), setting, BLOCK, LENGTH, additional_config=sparse)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=config.model_config.dtype)
        super().__init__(setting, config, LAYERS, spec, chance)
        self.method: SinkWindow = self.scheduler._ucm_sparse_method
        self.device: Device = Device(config, setting.options, setting.blocks, BLOCK)
        self.settled: set[str] = set()

    def submit(self, prompt: Sequence[int], max_tokens: int, asked: object = None) -> Any:
        """Submit a request; some ask to be dense."""
        if self.setting.dense and self.chance.random() < self.setting.dense:
            asked = False
        return super().submit(prompt, max_tokens, asked)

    def take_back(self, request: Any, num_tokens: int) -> None:
        """Do to a running request what vLLM's recovery does when a connector reports failed loads."""
        request.num_computed_tokens = num_tokens
        self.happened["taken back"] += 1

    def drain(self) -> None:
        super().drain()
        assert not self.method._blocks._ends
        assert not self.method._blocks._asked

    def held(self, request: Any) -> int:
        """Return the blocks that a request holds."""
        return sum(not block.is_null for block in self.manager.req_to_blocks.get(request.request_id, ()))

    def _scheduled(self, output: Any) -> None:
        """Check that no request holds more than sinks, window and tokens in flight, once its first step has succeeded.

        What the step gives to requests may be written beside the device's stream at once.
        """
        most = self.method.window.most_blocks(self.batches * self.setting.budget, BLOCK)
        for request_id in self.settled.intersection(output.num_scheduled_tokens):
            if not self.method.window.dense_prefill:
                held = self.held(self.requests[request_id])
                assert held <= most, f"request {request_id} holds {held} blocks"
                self.happened["most held"] = max(self.happened["most held"], held)
            row = self.manager.req_to_blocks[request_id]
            if request_id in self.device.dense:
                assert self.held(self.requests[request_id]) == len(row), f"dense request {request_id} has lost blocks"
                self.happened["longest dense row"] = max(self.happened["longest dense row"], len(row))
            self.happened["longest row"] = max(self.happened["longest row"], len(row))
        self.device.scribble(fresh(output, BLOCK))

    def _executed(self, alive: set[str]) -> None:
        self.settled |= alive

    def _ended(self, request: Any) -> None:
        self.settled.discard(request.request_id)
        tokens = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == following(marks(tokens)[-1])
            tokens.append(token)

    def _lose(self, request_id: str) -> None:
        super()._lose(request_id)
        self.settled.discard(request_id)
