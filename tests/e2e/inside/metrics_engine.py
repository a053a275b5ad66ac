"""Run one engine with UCM's connector: `metrics_engine.py MODEL STORE` prints what this process exports afterwards.

The engine is the server's: the offline one of older releases records no counts of steps without an output. The same
prompt is computed, and loaded after the engine forgot it; then loaded again with damaged files in the store.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

#: How often to look for what is still being written.
PATIENCE = 100
PROMPT = [3 + (7 * i) % 400 for i in range(640)]


async def main(model: str, store: Path) -> None:
    """Run it."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - needs vLLM
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    transfer = KVTransferConfig(
        kv_connector="UCMConnector",
        kv_connector_module_path="ucm.integration.vllm.ucm_connector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": {"directories": [str(store)], "posix_capacity": "1GiB"},
            "metrics_log_interval": 0.5,
        },
    )
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=704,
            kv_transfer_config=transfer,
        )
    )
    block: int = engine.vllm_config.cache_config.block_size
    tokens = []
    # Computed; damaged, and so computed again; read from the store; staged from that time on.
    for damage in (True, False, False, False):
        tokens.append(await _generate(engine, PROMPT))
        # Blocks become visible, and counts are handed over, with the steps that follow.
        for _ in range(PATIENCE):
            await _generate(engine, [5, 6, 7])
            if len(_blocks(store)) >= len(PROMPT) // block:
                break
            time.sleep(0.1)  # noqa: ASYNC251 - there is nothing else to do
        await engine.reset_prefix_cache()
        if damage:
            _flip_a_bit_in_each(_blocks(store))
    values = [
        [sample.name, {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}, sample.value]
        for family in import_module("prometheus_client").REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("ucm:")
    ]
    print("RESULT " + json.dumps({"tokens": tokens, "values": values, "block": block}))
    engine.shutdown()


async def _generate(engine: Any, prompt: list[int]) -> list[int]:
    from vllm import SamplingParams  # noqa: PLC0415 - needs vLLM

    params = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params, str(time.monotonic_ns())):
        tokens = list(output.outputs[0].token_ids)
    return tokens


def _blocks(store: Path) -> list[Path]:
    """The files of blocks: named by their keys, and none that was quarantined or is being written."""
    return [path for path in store.rglob("*") if path.is_file() and re.fullmatch(r"[0-9a-f]{62}", path.name)]


def _flip_a_bit_in_each(files: list[Path]) -> None:
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
