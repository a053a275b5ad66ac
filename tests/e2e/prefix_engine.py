"""An engine in a separate process that receives batches of requests; see `inside/converse.py`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import MODEL, PATIENCE, variables
from tests.e2e.model import write_model
from tests.e2e.processes import INSIDE, start
from tests.e2e.workload import ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from tests.e2e.environment import Environment
    from tests.e2e.workload import Request

MODULE = "ucm.integration.vllm.ucm_connector"
#: Lets several processes receive functions, with which `inside/converse.py` looks into the workers.
CODE_BY_RPC = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
#: A lookup's deadline, in seconds, that no load of a machine reaches; tests of late answers have their own.
PATIENT = 60.0
#: Seconds after which an ending engine is killed.
ENDING = 60.0


@dataclass(frozen=True)
class Answer:
    """The result of one request.

    Attributes:
        tokens: The generated tokens.
        cached: The number of prompt tokens that were not computed.
        first_s: Seconds from the batch's arrival to the first token; None if there is none.
        finish: Its finish reason.
        prompt_logprobs: The log-probability of each prompt token except the first, if requested.
        handed_over: The ``kv_transfer_params`` of a request that another engine decodes.
    """

    tokens: list[int]
    cached: int | None
    first_s: float | None
    finish: str | None
    prompt_logprobs: list[float | None] | None = None
    handed_over: dict[str, Any] | None = None


class EngineFailedError(Exception):
    """An engine ended or hung; the message contains the end of its log."""


def connector(store: Mapping[str, Any], name: str = "UCMDirectConnector", **settings: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for a UCM connector.

    Args:
        store: The ``store`` section of its configuration.
        name: The connector's class.
        settings: The rest of its configuration.
    """
    extra = {"store": dict(store), "staging_deadline": PATIENT, **settings}
    module = MODULE.replace("ucm_connector", "blend_connector") if name == "BlendConnector" else MODULE
    transfer = {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}
    return {"kv_transfer_config": {**transfer, "kv_role": "kv_both"}}


def posix(*directories: Path) -> dict[str, Any]:
    """Return the ``store`` section for a Posix store in some directories, and create them."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    return {"pipeline": "Posix", "directories": [str(directory) for directory in directories]}


class PrefixEngine:
    """A running engine, and a context manager that ends it.

    Args:
        environment: The environment with vLLM.
        directory: A new directory for its files.
        engine: Arguments of ``LLM`` that differ from `tests.e2e.workload.ENGINE`.
        switches: Environment variables.
        forked: Whether it may be forked from a process that has imported vLLM; not if its start is measured.

    Raises:
        EngineFailedError: By any call, if it has ended or hangs.
    """

    def __init__(
        self,
        environment: Environment,
        directory: Path,
        engine: Mapping[str, Any] | None = None,
        switches: Mapping[str, str] | None = None,
        *,
        forked: bool = True,
    ) -> None:
        directory.mkdir(parents=True)
        arguments, self._log = directory / "arguments.json", directory / "log.txt"
        wanted = {**ENGINE, **(engine or {})}
        wanted.setdefault("model", str(write_model(MODEL)))
        arguments.write_text(json.dumps(wanted), encoding="utf-8")
        with self._log.open("wb") as output:
            own = {"PYTHONPATH": "", **CODE_BY_RPC, **(switches or {})}
            self._process = start(
                environment,
                [INSIDE / "converse.py", arguments],
                directory=directory,
                variables=variables(directory, own),
                output=output,
                conversing=True,
                forked=forked,
            )
        self._started = False

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answers to requests that arrive at once."""
        return [Answer(**answer) for answer in self._call("generate", list(requests))]

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters and ours, by name and labels."""
        found: dict[str, float] = self._call("counters")
        return found

    def reset(self) -> bool:
        """Reset the engine's own prefix cache; return whether that succeeded."""
        return bool(self._call("reset"))

    def settle(self) -> None:
        """Generate until all that UCM's connectors have saved is visible."""
        self._call("settle")

    def reload(self, model: Path) -> None:
        """Load another model's weights in place."""
        self._call("reload", str(model))

    def scale(self, name: str, factor: float, rank: int | None = None) -> None:
        """Multiply one parameter in place, in one worker or in all (see ``converse.py``)."""
        self._call("scale", name, factor, rank)

    def blend(self, settings: Mapping[str, Any]) -> None:
        """Change settings of blending, in an engine of one process."""
        self._call("blend", dict(settings))

    def wait_until_started(self) -> float:
        """Wait for the start, as other calls do; return its duration in seconds."""
        self._started = True
        return float(self._answer())

    def processor_seconds(self) -> float:
        """Return the processor time that the engine has used, in an engine of one process."""
        if not self._started:
            self.wait_until_started()
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    @property
    def log(self) -> str:
        """Return the output of its processes so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End its processes with SIGKILL, also while it generates."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)

    def close(self) -> None:
        """End it as an operator would, and check that no process is left."""
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
        self._wait_for_end()
        self.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, *command: Any) -> Any:
        if not self._started:
            self.wait_until_started()
        stdin = self._process.stdin
        if stdin is None:
            raise EngineFailedError("the engine has no standard input")
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self._wait_for_end()
            raise EngineFailedError(self._end_of_log()) from None
        return self._answer()

    def _answer(self) -> Any:
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], PATIENCE)[0]:
            raise EngineFailedError(f"no answer for {PATIENCE} s\n{self._end_of_log()}")
        line = stdout.readline()
        if not line:
            self._wait_for_end()  # its last lines say why
            raise EngineFailedError(self._end_of_log())
        return json.loads(line)["answer"]

    def _wait_for_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)

    def _end_of_log(self) -> str:
        return self.log[-6000:]
