"""Run a short vLLM engine in a process of its own, for commands that examine a user's installation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucm.errors import UcmError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FINISHED, FAILED, TIMED_OUT = "finished", "failed", "timed out"
PLAN, RESULT, LOG = "plan.json", "result.json", "output.log"
TAIL_LINES = 30
#: The mix-in for vLLM's worker class (``worker_extension_cls``) that tells what runs in it.
WORKER_FACTS = "ucm.doctor.engine_run.WorkerFacts"
#: Lines that nanobind, used by Triton, prints after an error when the process exits.
_LEAK = re.compile(r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.")
#: The configuration of a tiny Llama with random weights.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
#: Files and processes have times of 10 ms resolution, and a connector does not trust a file that may be newer than its
#: process.
_OLDER_SECONDS = 0.1
#: The child's environment variables, unless the operator has set them.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "UCM_PATCH_VERBOSE": "1",
}


def check_model(model: Path) -> None:
    """Refuse a directory that contains no model.

    Raises:
        UcmError: There is no ``config.json``.
    """
    if not (model / "config.json").is_file():
        raise UcmError(
            "this directory contains no model: it has no config.json",
            where=f"model: {model}",
            fix="name a directory with config.json and the weights, as you would for vLLM",
        )


def prepare_model(model: Path | None, directory: Path) -> dict[str, str]:
    """What a plan says of the model; a tiny one is made in a directory if there is none."""
    if model is not None:
        weights = any(any(model.glob(pattern)) for pattern in WEIGHTS)
        return {"model": str(model.resolve()), "load_format": "auto" if weights else "dummy"}
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    time.sleep(_OLDER_SECONDS)
    return {"model": str(model), "load_format": "dummy"}


def run_child(
    module: str,
    directory: Path,
    plan: Mapping[str, Any],
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """Run ``python -m MODULE plan.json result.json`` in a fresh interpreter, with the overlay active or not.

    Args:
        module: The module to run.
        directory: Where the plan, the result and the output (`LOG`) are; its working directory.
        plan: What the module reads.
        timeout: Seconds after which it and all of its descendants are ended.
        environment: Further variables, unless the operator has set them.

    Returns:
        The outcome, and the child's process id.
    """
    (directory / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    child = None
    try:
        with (directory / LOG).open("wb") as output, _signals_deferred():
            child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", module, PLAN, RESULT],
                cwd=directory,
                env={**ENVIRONMENT, **(environment or {}), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return (FAILED if child.wait(timeout) else FINISHED), child.pid
        except subprocess.TimeoutExpired:
            return TIMED_OUT, child.pid
    finally:
        if child is not None:
            _end(child)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver Ctrl-C and signals to end only afterwards, so that a child that was started is known, and can be ended.

    Only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its remaining descendants, which all run in the child's own session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        child.wait()


def read_output(directory: Path) -> list[str]:
    """The lines of an engine's output, without those that say nothing."""
    lines = (directory / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if not _LEAK.match(line)]


def tail_of(directory: Path) -> list[str]:
    """The end of an engine's output."""
    return read_output(directory)[-TAIL_LINES:]
