"""First token of a prompt that another engine prefills, beside one engine: `python -m tests.e2e.bench.hand_off`.

Servers of a trained model in float32, on one machine: those that prefill, and one that decodes. In each round this one
computes a document, finds it in its own prefix cache, gets another document from a prefill engine, and loads that from
the store after its cache was emptied. All share the processors, so nothing is gained by the split itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.ttft import RELEASE
from tests.e2e.environment import with_runtime
from tests.e2e.install_vllm import name_vllm
from tests.e2e.prefix_engine import MODULE
from tests.e2e.real.chat import BOAT, HANDBOOK, PATH, Server, chat, serve_command
from tests.e2e.real.model import real_model
from tests.ports import free_port
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.environment import Environment
    from tests.e2e.real.chat import Reply

#: vLLM's transport, for ``--transport``; its wheel needs no CUDA to import.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
#: What `examples/hand_off/proxy.py` adds to a request for a prefill engine.
TO_PREFILL = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
COMPUTED, OWN, HANDED, STORED = "computed", "own prefix cache", "handed over", "from the store"


def transfer(role: str, store: Path, *, transport: bool) -> dict[str, Any]:
    """Return a ``kv_transfer_config``: UCM's connector, or vLLM's transport and UCM's behind it."""
    prefills = role == "kv_producer"
    ours = {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both" if prefills and transport else role,
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": {"store": {"directories": str(store), "posix_capacity": "4GiB"}},
    }
    if not transport:
        return ours
    connectors = [{"kv_connector": "NixlConnector", "kv_role": role}, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": connectors},
    }


def prepare(release: str, *, transport: bool) -> Environment:
    """Return vLLM with this checkout's runtime, and with the transport if it is wanted."""
    environment = with_runtime(release, BUILD / "bench" / f"vllm-{release}-hand-off")
    name_vllm(environment.site, release)
    if transport:
        pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *NIXL], check=True)
    return environment


class Round:
    """The requests of one round.

    Args:
        prefill: The prefill engine that has its turn.
        decode: The decode engine.
    """

    def __init__(self, prefill: Server, decode: Server) -> None:
        self._prefill, self._decode = prefill, decode
        self.seconds: dict[str, float] = {}
        self.cached: dict[str, int] = {}

    def run(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Ask about two documents, the second handed over; return whether all answers to it are those of one engine."""
        for name in (COMPUTED, OWN):
            self._note(name, self._decode.ask(one))
        begun = time.perf_counter()
        answer = json.loads(self._prefill.post(PATH, {**other, **TO_PREFILL}))
        prefilled = time.perf_counter() - begun
        handed = self._decode.ask({**other, "kv_transfer_params": answer["kv_transfer_params"]})
        self._note(HANDED, handed, prefilled)
        self.seconds["of that, the prefill engine"] = prefilled
        self._decode.post("/reset_prefix_cache")
        stored = self._decode.ask(other)
        self._note(STORED, stored)
        return handed.text == stored.text == self._prefill.ask(other).text

    def _note(self, name: str, reply: Reply, before: float = 0.0) -> None:
        self.seconds[name], self.cached[name] = before + reply.first_s, reply.cached


def measure(options: argparse.Namespace) -> tuple[list[Round], bool]:
    """Run all rounds; return them, and whether all answers were right."""
    environment, model = prepare(options.release, transport=options.transport), real_model()
    text = HANDBOOK.read_text(encoding="utf-8")[: options.characters]
    # With this, a server can be asked to empty its prefix cache.
    variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    rounds, right = [], True
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as running:
        store = Path(temporary, "store")
        store.mkdir()
        roles = ["kv_producer"] * options.prefills + ["kv_consumer"]
        servers = []
        for number, role in enumerate(roles):
            port, config = free_port(), transfer(role, store, transport=options.transport)
            command = f"{serve_command(environment, model, config, port)} --max-model-len 6144"
            side = {**variables, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            servers.append(Server(command, port, Path(options.logs, f"{number}-{role}.log"), side))
        with ThreadPoolExecutor() as starting:
            list(starting.map(running.enter_context, servers))
        *prefills, decode = servers
        for number in range(options.rounds + 1):
            one, other = (chat(BOAT, text=f"{what} {number}. {text}", tokens=16) for what in ("Copy", "Other"))
            if not number:  # first requests take longer
                one, other = (chat(BOAT, text=f"{what} {'word ' * 300}", tokens=4) for what in ("Copy", "Other"))
            found = Round(prefills[number % len(prefills)], decode)
            right = found.run(one, other) and right
            print(number, {name: round(value, 3) for name, value in found.seconds.items()}, found.cached, flush=True)
            rounds += [found] if number else []
    return rounds, right


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table; return 0 if all answers were those of one engine."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.hand_off", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefills", type=int, default=1, help="prefill engines, which take turns")
    parser.add_argument("--characters", type=int, default=None, help="of the document; default: all")
    parser.add_argument("--transport", action="store_true", help="NIXL moves the KV, and UCM is beside it")
    parser.add_argument("--logs", type=Path, default=BUILD / "bench", help="where the servers write theirs")
    options = parser.parse_args(arguments)
    # A bench that is stopped ends its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.logs.mkdir(parents=True, exist_ok=True)
    rounds, right = measure(options)
    table = Table("first token", "median", "from", "to", "not computed")
    for name in rounds[0].seconds:
        seconds = [one.seconds[name] for one in rounds]
        cached = {one.cached[name] for one in rounds if name in one.cached}
        figures = (median(seconds), min(seconds), max(seconds))
        table.add_row(name, *(f"{value:.3f} s" for value in figures), ", ".join(map(str, sorted(cached))))
    Console().print(table)
    print(f"load {os.getloadavg()[0]:.1f}; {shlex.join(sys.argv[1:])}; answers {'right' if right else 'WRONG'}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
