"""Servers that prefill, one that decodes, and `examples/hand_off/proxy.py` before them, all on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tests.e2e.prefix_engine import MODULE
from tests.e2e.real.chat import Server, serve_command
from tests.ports import free_port
from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from tests.e2e.environment import Environment

T = TypeVar("T")
#: How long the decode engine waits for the store: prefill engines that share its processors are slow to save.
SECONDS = 30.0
PROXY = ROOT / "examples" / "hand_off" / "proxy.py"


def transfer(store: Path, *, prefills: bool, transport: bool) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` as `docs/hand_off.md` has it.

    Args:
        store: The directory of the store.
        prefills: Whether it is for a prefill engine.
        transport: Whether NIXL moves the KV, with UCM beside it.
    """
    kept = {"directories": str(store), "posix_capacity": "4GiB"}
    ours = {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both" if prefills else "kv_consumer",
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": {"store": kept, "staging_deadline": SECONDS},
    }
    if not transport:
        return ours
    role = "kv_producer" if prefills else "kv_consumer"
    connectors = [{"kv_connector": "NixlConnector", "kv_role": role}, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": connectors},
    }


class Fleet:
    """The servers, and a context manager that waits for their start and ends them.

    Args:
        environment: The environment with vLLM, the runtime, and NIXL if it is wanted.
        model: The model.
        directory: A directory for their store and logs.
        prefills: How many prefill.
        transport: Whether NIXL moves the KV.
        options: Further options of `vllm serve`.
    """

    def __init__(
        self,
        environment: Environment,
        model: Path,
        directory: Path,
        *,
        prefills: int = 2,
        transport: bool = False,
        options: str = "",
    ) -> None:
        self._python, self._logs, self._running = environment.python, directory, contextlib.ExitStack()
        self.store = directory / "store"
        self.store.mkdir(parents=True)
        servers = []
        for number in range(prefills + 1):
            port, config = free_port(), transfer(self.store, prefills=number < prefills, transport=transport)
            variables = self._variables(VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
            command = f"{serve_command(environment, model, config, port)} {options}"
            servers.append(Server(command, port, directory / f"server {number}.txt", variables))
        *self.prefills, self.decode = servers

    def proxy(self, *prefills: Server) -> Server:
        """Start a proxy before the decode engine and some of those that prefill."""
        port = free_port()
        addresses = [f"http://127.0.0.1:{one.port}" for one in prefills]
        words = [self._python, PROXY, "--prefill", *addresses]
        words += ["--decode", f"http://127.0.0.1:{self.decode.port}", "--port", port]
        one = Server(shlex.join(map(str, words)), port, self._logs / f"proxy {port}.txt", self._variables())
        return self._running.enter_context(one)

    def _variables(self, **more: str) -> dict[str, str]:
        """Return a server's environment: one thread each, because threads of several servers that spin stall them all.

        With `VLLM_SERVER_DEV_MODE`, a server can be asked to empty its prefix cache.
        """
        ours = ("UCM_", "VLLM_", "PYTHON", "PYTEST_")
        rest = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**rest, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as started:
            at_once([partial(started.enter_context, one) for one in (*self.prefills, self.decode)])
            self._running = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions at the same time, and return their results when all have ended."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [one.result() for one in [threads.submit(call) for call in calls]]
