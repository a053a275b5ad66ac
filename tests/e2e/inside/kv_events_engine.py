"""Run one engine whose events vLLM publishes, and write those of one prompt: `kv_events_engine.py SPEC RESULT`.

The prompt is computed and saved, and loaded after the engine forgot it. A subscriber, as a router is one, reads the
events.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

#: vLLM's own packages.
msgspec: Any = import_module("msgspec")
zmq: Any = import_module("zmq")

BLOCK = 32
PROMPT = [3 + (11 * i) % 400 for i in range(6 * BLOCK + 5)]
#: Seconds for what is announced with one of the steps that follow.
PATIENCE = 60.0


class Router:
    """A subscriber of the engine's events."""

    def __init__(self, endpoint: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch  # noqa: PLC0415 - needs vLLM

        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def events(self) -> list[dict[str, Any]]:
        """What has arrived since the last call."""
        found = []
        while self._socket.poll(200):
            *_, payload = self._socket.recv_multipart()
            found += [
                {"kind": type(event).__name__, **msgspec.to_builtins(event)}
                for event in self._decoder.decode(payload).events
            ]
        return found


def main(spec_file: Path, result_file: Path) -> None:
    """Run it."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - needs vLLM

    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    endpoint = f"ipc://{spec['store']}/events"
    router = Router(endpoint)
    engine = LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK,
        dtype="float32",
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
        **spec["engine"],
    )
    params = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)

    def generate(tokens: list[int], until: int) -> list[dict[str, Any]]:
        """Answer a request, and others until so many blocks of the store were announced."""
        engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        found, end = router.events(), time.monotonic() + PATIENCE
        while sum(one.get("medium") == "STORAGE" for one in found) < until and time.monotonic() < end:
            engine.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
            found += router.events()
        return found

    saved = generate(PROMPT, len(PROMPT) // BLOCK)
    engine.reset_prefix_cache()
    loaded = generate(PROMPT, len(PROMPT) // BLOCK)
    result_file.write_text(json.dumps({"saved": saved, "loaded": loaded}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
