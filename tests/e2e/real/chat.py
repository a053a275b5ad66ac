"""A chat about a document with `vllm serve`, over HTTP with streaming."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from tests.e2e.environment import Environment

HANDBOOK = Path(__file__).with_name("handbook.txt")
#: The model's name in requests.
SERVED = "smollm2"
BOAT = "What is the name of the station's boat?"
HIGHEST = "What is the highest temperature ever measured at the station?"
#: Seconds within which a server starts on a busy machine, ends, and answers.
START, END, ANSWER = 600.0, 60.0, 300.0
PATH = "/v1/chat/completions"


class ServerFailedError(Exception):
    """A server ended, hung, or refused a request; the message has the end of its log or its answer."""


@dataclass(frozen=True)
class Reply:
    """The answer to one request.

    Attributes:
        text: The generated text.
        first_s: Seconds to the first piece of the text.
        whole_s: Seconds to its end.
        prompt: Tokens of the prompt.
        cached: How many of them were not computed.
    """

    text: str
    first_s: float
    whole_s: float
    prompt: int
    cached: int


def chat(question: str, *, text: str | None = None, tokens: int = 48) -> dict[str, Any]:
    """Return the body of a greedy chat request about a text, by default the handbook.

    So small a model answers best if the text and the question are turns of their own.
    """
    document = HANDBOOK.read_text(encoding="utf-8") if text is None else text
    turns = [
        {"role": "user", "content": f"Read this handbook.\n\n{document}"},
        {"role": "assistant", "content": "I have read it. What would you like to know about the station?"},
        {"role": "user", "content": question},
    ]
    return {"model": SERVED, "messages": turns, "temperature": 0, "max_tokens": tokens}


def serve_command(environment: Environment, model: Path, transfer: Mapping[str, Any] | None, port: int) -> str:
    """Return a shell command that serves a model on the CPU, with a ``kv_transfer_config`` or without one.

    In float32, loaded and computed KV give the same tokens. In bfloat16, vLLM 0.32.0's attention uses AMX before a
    layer of so small a model has asked the operating system for it: the worker ends with an illegal instruction.

    All processes import what is installed, and nothing from the directory where they are started: this repository has
    a ``ucm`` as well.
    """
    python = shlex.quote(str(environment.python))
    lines = [
        f"env PYTHONSAFEPATH=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind {python}",
        f"-m vllm.entrypoints.cli.main serve {shlex.quote(str(model))} --served-model-name {SERVED} --port {port}",
        "--dtype float32 --enforce-eager --enable-prompt-tokens-details",
    ]
    if transfer is not None:
        # Blocks that are being saved when the server is asked to end are saved first; by default vLLM ends at once.
        lines.append(f"--shutdown-timeout 60 --kv-transfer-config {shlex.quote(json.dumps(transfer))}")
    return " \\\n    ".join(lines)


def curl_command(body: Path, port: int) -> str:
    """Return a shell command that sends the request in a file."""
    data = shlex.quote(f"@{body}")
    return f'curl http://127.0.0.1:{port}{PATH} -H "Content-Type: application/json" -d {data}'


class Server:
    """A server started by a shell command, and a context manager that waits for its start and ends it.

    Args:
        command: The command.
        port: The port in it.
        log: A new file for its output.
        variables: Its environment variables; by default this process's.

    Raises:
        ServerFailedError: By any call, if it has ended, hangs, or refuses a request.
    """

    def __init__(self, command: str, port: int, log: Path, variables: Mapping[str, str] | None = None) -> None:
        self.port = port
        self._command, self._log, self._variables = command, log, variables

    @property
    def pid(self) -> int:
        """The server's process id, which is also its processes' group."""
        return self._process.pid

    def ask(self, body: Mapping[str, Any], show: Callable[[str], object] = len) -> Reply:
        """Return the answer to a chat request.

        Args:
            body: The request, without what makes it stream.
            show: Called with each piece of the answer as it comes.
        """
        begin = time.perf_counter()
        pieces: list[str] = []
        first = 0.0
        usage: dict[str, Any] = {}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER)) as connection:
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            connection.request("POST", PATH, json.dumps(streamed), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ServerFailedError(f"{response.status}: {response.read().decode(errors='replace')}")
            for line in response:
                event = line.decode().strip().removeprefix("data: ")
                if not event or event == "[DONE]":
                    continue
                content = json.loads(event)
                if "error" in content:
                    raise ServerFailedError(f"{content['error']}\n{self._end_of_log()}")
                usage = content.get("usage") or usage
                for piece in filter(None, (choice["delta"].get("content") for choice in content["choices"])):
                    first = first or time.perf_counter() - begin
                    pieces.append(piece)
                    show(piece)
        if not pieces:
            raise ServerFailedError(f"it answered without text\n{self._end_of_log()}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        whole = time.perf_counter() - begin
        return Reply("".join(pieces), first, whole, usage["prompt_tokens"], cached)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Send a request that does not stream, for instance to empty the prefix cache; return the answer."""
        return self._answer("POST", path, body)

    def get(self, path: str) -> bytes:
        """Return what there is at a path, for instance metrics."""
        return self._answer("GET", path, None)

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        text, headers = (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER)) as connection:
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != http.HTTPStatus.OK:
                raise ServerFailedError(f"{path}: {response.status}: {answer.decode(errors='replace')}")
            return answer

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {self._command}"],  # noqa: S607 - the shell that a user would paste it into
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def kill(self) -> None:
        """End its processes with SIGKILL, also while it computes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it as an operator would, and leave no process of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(END)
        self.kill()
        self._process.wait()

    def _wait(self) -> None:
        """Wait until it answers. Another program's answer on the same port is not taken for its own."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection,
            ):
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK and self._process.poll() is None:
                    return
            time.sleep(0.5)
        raise ServerFailedError(f"the server did not start\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
