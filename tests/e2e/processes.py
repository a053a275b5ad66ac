"""Start scripts of `tests/e2e/inside` in an environment, with a single import of vLLM for many of them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.environment import Environment

INSIDE = Path(__file__).parent / "inside"
#: One process instead of three, which starts in a third of the time.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
#: Variables that are read after the import of vLLM. Processes that differ in others do not share an import.
LATE = frozenset(
    {
        "PYTHONPATH",
        "RULE_THAT_INSERTS_NOTHING",
        "UCM_E2E_REPORTS",
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "XDG_CACHE_HOME",
    }
)
#: Seconds that a process that forks others has for its own end.
ENDING = 5.0


class Process(Protocol):
    """What `start` returns: the part of `subprocess.Popen` that the tests use."""

    @property
    def pid(self) -> int:
        """The process's id, which is also its session's."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """A pipe to its standard input, if it converses."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """A pipe from its standard output, if it converses."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, or raise `subprocess.TimeoutExpired`."""


def start(
    environment: Environment,
    command: Sequence[Path | str],
    *,
    directory: Path,
    variables: Mapping[str, str],
    output: IO[bytes],
    conversing: bool = False,
    forked: bool = True,
) -> Process:
    """Start a script in a session of its own.

    It is forked from a process that has imported vLLM in the same environment with the same variables, and forks the
    processes of its engine. A script with variables of UCM, which may change what is imported, is a new process, whose
    engine's processes import vLLM themselves.

    Args:
        environment: The environment with vLLM.
        command: The script and its arguments.
        directory: Its working directory.
        variables: Its environment variables.
        output: Where its standard error goes, and its standard output unless it converses.
        conversing: Whether its standard input and output are pipes.
        forked: Whether it may be forked; not if its start is measured.
    """
    told = [str(part) for part in command]
    switches = [name for name in variables if name.startswith("UCM_") and name not in LATE]
    if forked and not switches:
        early = tuple(sorted((name, value) for name, value in variables.items() if name not in LATE))
        return _server(environment.python, early).start(told, directory, variables, output, conversing=conversing)
    pipe = subprocess.PIPE if conversing else None
    return subprocess.Popen(
        [environment.python, *told],
        env=variables,
        cwd=directory,
        stdin=pipe or subprocess.DEVNULL,
        stdout=pipe or output,
        stderr=output,
        start_new_session=True,
    )


class _Server:
    """A process that has imported vLLM; see `inside/prefork.py`. It ends when this one does."""

    def __init__(self, python: Path, variables: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, INSIDE / "prefork.py", str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def start(
        self, command: list[str], directory: Path, variables: Mapping[str, str], output: IO[bytes], *, conversing: bool
    ) -> Process:
        """Fork a process, and return when it has its session."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps({"command": command, "directory": str(directory), "variables": dict(variables)})
        with contextlib.ExitStack() as given:
            given.enter_context(theirs)
            stdin = stdout = None
            if conversing:
                read, write = os.pipe()
                stdin, from_us = open(write, "wb"), given.enter_context(open(read, "rb"))  # noqa: PTH123, SIM115
                read, write = os.pipe()
                stdout, to_us = open(read, "rb"), given.enter_context(open(write, "wb"))  # noqa: PTH123, SIM115
                streams: list[IO[bytes]] = [from_us, to_us, output]
            else:
                streams = [given.enter_context(open(os.devnull, "rb")), output, output]  # noqa: PTH123
            descriptors = [*(stream.fileno() for stream in streams), theirs.fileno()]
            socket.send_fds(self._control, [message.encode()], descriptors)
        pid = ours.recv(100)
        # What the import printed belongs to the output of each process: a new one would have printed it as well.
        output.write(self._printed())
        output.flush()
        if not pid:
            raise RuntimeError(f"vLLM cannot be imported:\n{self._printed().decode(errors='replace')[-4000:]}")
        return _Forked(int(pid), ours, stdin, stdout)

    def close(self) -> None:
        """End it; processes that it has forked go on."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _printed(self) -> bytes:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0)


@functools.cache
def _server(python: Path, variables: tuple[tuple[str, str], ...]) -> _Server:
    return _Server(python, dict(variables))


class _Forked:
    """A process that a server has forked."""

    def __init__(self, pid: int, report: socket.socket, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._report = report
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, or raise `subprocess.TimeoutExpired`."""
        if self._code is None:
            self._report.settimeout(timeout)
            try:
                # Empty if the server was killed.
                self._code = int(self._report.recv(100) or -1)
            except TimeoutError:
                raise subprocess.TimeoutExpired([], timeout or 0) from None
            self._report.close()
        return self._code
