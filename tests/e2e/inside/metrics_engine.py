"""Run one engine with UCM's connector: `metrics_engine.py MODEL STORE` prints what this process exports afterwards.

The same prompt is computed, and loaded after the engine forgot it; then loaded again with damaged files in the store.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

#: Files of less bytes hold no block.
SMALLEST_BLOCK = 1 << 16
PROMPT = [3 + (7 * i) % 400 for i in range(640)]


def main(model: str, store: Path) -> None:
    """Run it."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - needs vLLM
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    transfer = KVTransferConfig(
        kv_connector="UCMConnector",
        kv_connector_module_path="ucm.integration.vllm.ucm_connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": {"directories": [str(store)]}, "metrics_log_interval": 0.5},
    )
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=704,
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )
    params = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    tokens = []
    for damage in (False, True, False):
        outputs = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        tokens.append(list(outputs[0].outputs[0].token_ids))
        llm.reset_prefix_cache()
        if damage:
            _flip_a_bit_in_each_file(store)
    values = [
        [sample.name, {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}, sample.value]
        for family in import_module("prometheus_client").REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("ucm:")
    ]
    print("RESULT " + json.dumps({"tokens": tokens, "values": values, "block": _block_size(llm)}))


def _flip_a_bit_in_each_file(store: Path) -> None:
    for path in store.rglob("*"):
        if path.is_file() and path.stat().st_size > SMALLEST_BLOCK:
            with path.open("r+b") as file:
                file.seek(-SMALLEST_BLOCK // 2, 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))


def _block_size(llm: object) -> int:
    size: int = llm.llm_engine.vllm_config.cache_config.block_size  # type: ignore[attr-defined]
    return size


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
