"""One side of the comparison while it runs: its engine, its server, its files."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.e2e.bench.ttft_engine import EngineFailedError, ProcessGroup, TimedEngine
from tests.e2e.bench.ttft_model import ENGINE
from tests.e2e.bench.ttft_quiet import Others
from tests.e2e.engine import variables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.bench.peers import Place, Setup
    from tests.e2e.bench.ttft_engine import FirstToken
    from tests.e2e.bench.ttft_quiet import Quiet

SERVER_PATIENCE = 60.0
CHUNK = 1 << 22


class Answers(NamedTuple):
    """What one call of `Side.ask` brought.

    Attributes:
        first_tokens: One for each prompt.
        others: The share of all processors that others used meanwhile, 0 to 1.
        disturbed: Whether that was enough to disturb.
    """

    first_tokens: list[FirstToken]
    others: float
    disturbed: bool


class Side:
    """A setup with its processes.

    Args:
        setup: What to run.
        place: Where its configuration lets it keep its blocks.
        scratch: A directory for logs.
        quiet: What waits for a quiet machine.
    """

    def __init__(self, setup: Setup, place: Place, scratch: Path, quiet: Quiet) -> None:
        self.quiet = quiet
        self.setup = setup
        self._place = place
        self._scratch = scratch
        self._engine: TimedEngine | None = None
        self._server: ProcessGroup | None = None

    @property
    def engine(self) -> TimedEngine:
        """The running engine."""
        if self._engine is None:
            raise EngineFailedError(f"{self.setup.name} is not running")
        return self._engine

    def start(self, **engine: Any) -> None:
        """Start the server, unless it runs, and the engine, with some arguments of its own."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._place.disk.mkdir(parents=True, exist_ok=True)
        processors = os.cpu_count() or 1
        environment = {
            **variables(self._scratch),
            "OMP_NUM_THREADS": str(processors),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{processors - 1}",
            "PYTHONPATH": "",
            **self.setup.variables,
        }
        if self.setup.server is not None and self._server is None:
            directory = self._scratch / "server"
            directory.mkdir(exist_ok=True)
            self._server = ProcessGroup(self.setup.server, environment, directory)
            self._await_port()
        arguments = {**ENGINE, **engine}
        if self.setup.transfer is not None:
            arguments["kv_transfer_config"] = dict(self.setup.transfer)
        self._engine = TimedEngine(self.setup.python, arguments, environment, self._scratch / "engine")
        self._engine.started()

    def stop(self) -> None:
        """Stop the engine; the server goes on."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def lose_memory(self) -> None:
        """End the server and forget all that a stopped engine has left in memory."""
        if self._server is not None:
            self._server.process.terminate()
            self._server.end(SERVER_PATIENCE)
            self._server = None
        shutil.rmtree(self._place.memory, ignore_errors=True)

    def close(self) -> None:
        """End everything and delete what was stored."""
        self.stop()
        self.lose_memory()
        for left in self._place.memory.parent.glob(f"*{self._place.name}*"):
            left.unlink(missing_ok=True)
        shutil.rmtree(self._place.disk, ignore_errors=True)

    def ask(self, *prompts: list[int], answer: int = 1) -> Answers:
        """The first tokens, or longer answers, one right after the other, from a quiet machine."""
        self.quiet.wait()
        others = self.others()
        return Answers(self.engine.ask(*prompts, answer=answer), *others.used())

    def others(self) -> Others:
        """What measures the processor time of all that do not belong to this side."""
        servers = [self._server] if self._server else []
        return Others([group.process.pid for group in (self.engine, *servers)])

    def read_files(self) -> None:
        """Bring all that it stored into the page cache."""
        buffer = memoryview(bytearray(CHUNK))
        for descriptor in self._files():
            while os.readv(descriptor, [buffer]):
                pass

    def drop_files(self) -> None:
        """Take all that it stored out of the page cache."""
        for descriptor in self._files():
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _files(self) -> Iterator[int]:
        """A descriptor of each of its files."""
        for path in sorted(self._place.disk.rglob("*")):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    yield descriptor
                finally:
                    os.close(descriptor)

    def _await_port(self) -> None:
        deadline = time.monotonic() + SERVER_PATIENCE
        while time.monotonic() < deadline and self._server is not None and self._server.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._place.port + 1)):
                return
            time.sleep(0.2)
        raise EngineFailedError(f"the server did not start\n{self._server.log_end() if self._server else ''}")
