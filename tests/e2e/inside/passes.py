"""Count the files and functions of UCM that a prompt passes through: `passes.py MODEL STORE ARGUMENTS RESULT`.

The engine runs in one process. One prompt is saved, pushed out of the KV cache by others, and loaded. `sys.setprofile`
and `threading.setprofile` see each call in each of its threads. Lambdas and comprehensions count with the function
around them.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

BLOCKS, OTHERS = 8, 6
#: Seconds without a new call after which a save has ended, and the most to wait for that.
QUIET, PATIENCE = 2.0, 60.0


class Passes:
    """The code of every called function, while it is recorded."""

    def __init__(self) -> None:
        self._seen: set[CodeType] | None = None
        self._last = time.monotonic()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        seen = self._seen
        if seen is not None and event == "call" and frame.f_code not in seen:
            seen.add(frame.f_code)
            if "/ucm/" in frame.f_code.co_filename:
                self._last = time.monotonic()

    def begin(self) -> None:
        """Begin to record."""
        self._seen, self._last = set(), time.monotonic()

    def end(self) -> dict[str, Any]:
        """Stop once no new function is called any more; return the files and the functions of UCM."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < min(ends, self._last + QUIET):
            time.sleep(0.1)
        seen, self._seen = self._seen or set(), None
        root = Path(sys.modules["ucm"].__file__ or "").parent
        functions = sorted(_of(root, seen))
        return {"files": sorted({file for file, _, _ in functions}), "functions": functions}


def _of(root: Path, seen: set[CodeType]) -> Iterator[tuple[str, str, int]]:
    for code in seen:
        file = Path(code.co_filename)
        if file.is_relative_to(root) and not code.co_name.startswith("<"):
            yield file.relative_to(root).as_posix(), code.co_name, code.co_firstlineno


def main(model: str, store: str, arguments: dict[str, Any], result: Path) -> None:
    """Run the engine, and write what was called as JSON."""
    passes = Passes()
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - its threads are to be seen as well

    transfer = {
        "kv_connector": "UCMDirectConnector",
        "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
        "kv_connector_extra_config": {"store": {"directories": [store]}},
        "kv_role": "kv_both",
    }
    llm = LLM(model=model, kv_transfer_config=transfer, **arguments)
    block = arguments["block_size"]
    source = random.Random(1)  # noqa: S311 - prompts, no secrets

    def run(prompt: list[int]) -> int:
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return int(output.num_cached_tokens or 0)

    prompts = [[source.randrange(3, 90) for _ in range(BLOCKS * block + 1)] for _ in range(OTHERS + 2)]
    run(prompts[0])  # opens the store
    passes.begin()
    cached = run(prompts[1])
    saved = passes.end()
    for prompt in prompts[2:]:
        run(prompt)
    passes.begin()
    loaded_tokens = run(prompts[1])
    loaded = passes.end()
    if cached or loaded_tokens < BLOCKS * block:
        raise SystemExit(f"{cached} tokens were cached at first and {loaded_tokens} the second time")
    result.write_text(json.dumps({"saved": saved, "loaded": loaded}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
