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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import UcmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

FINISHED, FAILED, TIMED_OUT = "finished", "failed", "timed out"
PLAN, RESULT, LOG = "plan.json", "result.json", "output.log"
TAIL_LINES = 30
#: The modules of the connectors, by the name that vLLM's settings give.
CONNECTORS = {"UCMConnector": "ucm_connector", "BlendConnector": "blend_connector"}
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


@dataclass(frozen=True)
class Ended:
    """A child process that has ended."""

    outcome: str
    directory: Path
    pid: int = 0

    @property
    def failure(self) -> str:
        """How it ended, in words; empty if it finished."""
        return {FINISHED: "", FAILED: "failed", TIMED_OUT: "did not finish in time"}[self.outcome]

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.directory / LOG

    @property
    def lines(self) -> list[str]:
        """Its output, without the lines that say nothing."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        return [line for line in lines if not _LEAK.match(line)]

    @property
    def tail(self) -> list[str]:
        """The end of its output; empty if it finished."""
        return self.lines[-TAIL_LINES:] if self.failure else []

    def results(self) -> list[Any]:
        """Return what it reported, a JSON value on each line, as far as it came: it may have been ended in one."""
        file, found = self.directory / RESULT, []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found


def connector(extra: Mapping[str, Any], name: str = "UCMConnector") -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config`` for one of our connectors and its settings."""
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": f"ucm.integration.vllm.{CONNECTORS[name]}",
        "kv_connector_extra_config": dict(extra),
    }


def model_config(model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's ``config.json``, and the part of it that describes the language model.

    Raises:
        UcmError: It cannot be read, so the directory contains no model.
    """
    path, text = model.absolute() / "config.json", None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        wrong = f"{path} cannot be read: {error.strerror}"
    except ValueError as error:
        wrong = f"{path} is not JSON: {error}"
    else:
        wrong = f"{path} is not a JSON object"
        if isinstance(config, dict):
            text, wrong = config.get("text_config") or config, f"{path}: text_config is not a JSON object"
    if not isinstance(text, dict):
        raise UcmError(wrong, fix="give --model the directory of a model, with its config.json")
    return config, text


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
) -> Ended:
    """Run ``python -m MODULE plan.json result.json`` in a fresh interpreter, with the overlay active or not.

    Args:
        module: The module to run.
        directory: Where the plan, the result and the output (`LOG`) are; its working directory.
        plan: What the module reads.
        timeout: Seconds after which it and all of its descendants are ended.
        environment: Further variables, unless the operator has set them.
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
            return Ended(FAILED if child.wait(timeout) else FINISHED, directory, child.pid)
        except subprocess.TimeoutExpired:
            return Ended(TIMED_OUT, directory, child.pid)
    finally:
        if child is not None:
            _end(child)


def run_plan(run: Callable[[dict[str, Any], Callable[[Any], None]], None]) -> None:
    """Be a child of `run_child`.

    Args:
        run: Takes the plan, and a function that takes each part of the result; what was told is kept, whatever follows.
    """
    plan, result = map(Path, sys.argv[1:3])
    with result.open("a", encoding="utf-8", buffering=1) as file:
        run(json.loads(plan.read_text(encoding="utf-8")), lambda told: print(json.dumps(told), file=file))


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Let a function handle signals meanwhile."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver Ctrl-C and signals to end only afterwards, so that a child that was started is known, and can be ended.

    Only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    with handled(lambda number, _: came.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield
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
