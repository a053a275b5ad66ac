"""vLLM's own scheduler with both sides of ESA; imported only if vLLM is installed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.ucm.sparse.esa.toy import KV_HEADS, LAYERS, LENGTH, SIZE, Device
from tests.ucm.stepping.engine import CheckedEngine
from tests.ucm.stepping.setting import EngineSetting
from tests.ucm.stepping.vllm_objects import engine_config
from ucm.sparse.base import Role
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    import random
    from pathlib import Path

    import torch

BLOCK = 4


@dataclass(frozen=True)
class Setting(EngineSetting):
    """An engine.

    Args:
        options: The method's options, except its store.
        at_once: Whether an offloaded context is released from its first block on.
    """

    options: dict[str, Any] = field(default_factory=lambda: {"token_budget": 16, "sink_tokens": 3, "window_tokens": 10})
    at_once: bool = False
    blocks: int = field(default=100, kw_only=True)


class Engine(CheckedEngine):
    """An engine that checks its resident blocks, and keeps the output.

    Args:
        setting: The engine's setting.
        directory: The directory of its model's configuration and its store.
        chance: The source of random choices.
    """

    def __init__(self, setting: Setting, directory: Path, chance: random.Random) -> None:
        self.setting = setting
        self.root = directory / "store"
        self.root.mkdir(mode=0o700)
        options = {**setting.options, "store": {"pipeline": "Posix", "directories": [str(self.root)]}}
        name = f"tests.ucm.sparse.esa.toy:{'EagerSmallTiles' if setting.at_once else 'SmallTiles'}"
        sparse = {"ucm_sparse_config": {name: options}}
        config = engine_config(write_model(MODEL), setting, BLOCK, LENGTH, additional_config=sparse)
        kind = config.model_config.dtype
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=kind)
        super().__init__(setting, config, [f"layer.{layer}" for layer in range(LAYERS)], spec, chance)
        self.method: Any = self.scheduler._ucm_sparse_method
        self.worker: Any = method_class(name)(config, Role.WORKER, options)
        assert not self.worker.confirms(self.method.asks_workers())
        always = options["sink_tokens"], options["window_tokens"]
        self.device: Device = Device(self.worker, setting.blocks, BLOCK, always)
        #: For each request that has finished: prompt, output, and the last layer's KV of all these tokens.
        self.answers: dict[str, tuple[list[int], list[int], torch.Tensor]] = {}
        #: The most blocks that a request with an offloaded context has held, by its tokens in hundreds.
        self.held: Counter[int] = Counter()

    def drain(self) -> None:
        super().drain()
        assert not self.method._blocks._offloaded

    def _ended(self, request: Any) -> None:
        if request.status != RequestStatus.FINISHED_ABORTED:
            kv = self.device.written[request.request_id, LAYERS - 1]
            self.answers[request.request_id] = list(request.prompt_token_ids), list(request.output_token_ids), kv
            self.happened["preempted answers"] += bool(request.num_preemptions)

    def _beside_row(self, request_id: str) -> list[int]:
        offloaded = self.method._blocks._offloaded.get(request_id)
        return [block.block_id for block in offloaded.resident] if offloaded else []

    def _check_blocks(self) -> None:
        """Check that each resident block belongs to one request only."""
        super()._check_blocks()
        for request_id, offloaded in self.method._blocks._offloaded.items():
            if row := self.manager.req_to_blocks.get(request_id):
                held = sum(not block.is_null for block in row) + len(offloaded.resident)
                tokens = self.requests[request_id].num_computed_tokens // 100
                self.held[tokens] = max(self.held[tokens], held)
            for block in offloaded.resident:
                assert (block.ref_cnt, block.block_hash) == (1, None), "a resident block can be found by others"
