"""A chat about a document on a real vLLM with UCM, on the CPU: `python -m tests.e2e.demo [RELEASE]`.

A server computes the document's KV, another one that starts later loads it from the store. At the end it prints the
commands to go on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

from tests.e2e.environment import Environment, with_overlay
from tests.e2e.install_vllm import ENVIRONMENTS, name_vllm
from tests.e2e.prefix_engine import MODULE
from tests.e2e.real.chat import BOAT, HANDBOOK, HIGHEST, Server, ServerFailedError, chat, curl_command, serve_command
from tests.e2e.real.model import real_model
from tests.ports import free_port
from transforms.engine.errors import OverlayError
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.real.chat import Reply

DIRECTORY = BUILD / "demo"
#: vLLM's usual port, for the server that the user starts.
PORT = 8000
#: A short chat that each server answers first, since its first request takes longer than others.
WARM_UP = chat("Hello!", text="The station has three rules.", tokens=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, chat with two servers, and compare; return 0 if the answers are the same and KV was loaded."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.demo", description=__doc__)
    parser.add_argument("release", nargs="?", default="0.32.0")
    release = parser.parse_args(arguments).release
    print(
        f"1. vLLM {release} for the CPU with our two wheels, and a small model (the first time takes minutes)",
        flush=True,
    )
    try:
        environment, model = demo_environment(release), real_model()
        print(f"   {environment.python}\n   {model}", flush=True)
        transfer = prepare(DIRECTORY)
        well = show_chat(environment, model, transfer)
    except (OverlayError, ServerFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    doctor = shlex.quote(str(environment.directory / "bin" / "ucm"))
    for what, command in (
        ("4. Go on: serve the model with this store,", serve_command(environment, model, transfer, PORT)),
        ("   and ask from another terminal; `cached_tokens` were loaded:", curl_command(question(DIRECTORY), PORT)),
        ("   Which hooks are called in which process (starts an engine):", f"{doctor} doctor --run"),
    ):
        print(f"\n{what}\n\n{command}")
    return int(not well)


def demo_environment(release: str) -> Environment:
    """Return vLLM with both wheels, and with metadata named ``vllm``, which `vllm serve` needs."""
    environment = with_overlay(release, ENVIRONMENTS / f"vllm-{release}-demo")
    name_vllm(environment.site, release)
    return environment


def question(directory: Path) -> Path:
    """Return the file of the request that the user sends."""
    return directory / "question.json"


def prepare(directory: Path) -> dict[str, object]:
    """Write an empty store, its configuration and a request to a directory; return a ``kv_transfer_config``."""
    shutil.rmtree(directory, ignore_errors=True)
    store, config = directory / "store", directory / "ucm_config.yaml"
    store.mkdir(parents=True)
    settings = {"store": {"pipeline": "Posix", "directories": str(store), "posix_capacity": "2GiB"}}
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    question(directory).write_text(json.dumps(chat(HIGHEST), indent=1) + "\n", encoding="utf-8")
    return {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": {"UCM_CONFIG_FILE": str(config)},
    }


def show_chat(environment: Environment, model: Path, transfer: dict[str, object]) -> bool:
    """Chat with two servers, one after the other; return whether their answers are the same and KV was loaded."""
    words = len(HANDBOOK.read_text(encoding="utf-8").split())
    print(
        f"\n2. A server with an empty store reads a handbook of {words:,} words (tests/e2e/real/handbook.txt)",
        flush=True,
    )
    with Server(*started(environment, model, transfer, "first")) as server:
        server.ask(WARM_UP)
        computed = told(server, BOAT)
        engine = told(server, BOAT)
    print("\n3. That server has ended. A new one has the same store", flush=True)
    with Server(*started(environment, model, transfer, "second")) as server:
        server.ask(WARM_UP)
        loaded = told(server, BOAT)
        other = told(server, HIGHEST)
    print(f"\n   {'':46}{'prompt':>7}{'not computed':>14}{'first token':>13}{'sooner':>10}")
    for name, reply in {
        "first server, computed": computed,
        "first server, vLLM's own prefix cache": engine,
        "second server, loaded from the store": loaded,
        "second server, another question": other,
    }.items():
        sooner = "" if reply is computed else f"{computed.first_s / reply.first_s:.1f} x"
        print(f"   {name:46}{reply.prompt:7}{reply.cached:14}{reply.first_s:11.2f} s{sooner:>10}")
    same = computed.text == engine.text == loaded.text
    print(f"\n   The answers to the first question are {'the same' if same else 'NOT THE SAME'}.")
    return same and not computed.cached and loaded.cached > 0 and other.cached > 0


def started(environment: Environment, model: Path, transfer: dict[str, object], name: str) -> tuple[str, int, Path]:
    """Return the command, the port and the log of a server."""
    port = free_port()
    return serve_command(environment, model, transfer, port), port, DIRECTORY / f"{name}-server.log"


def told(server: Server, asked: str) -> Reply:
    """Ask, and print the answer as it comes."""
    print(f"\n   > {asked}\n   ", end="", flush=True)
    reply = server.ask(chat(asked), lambda piece: print(piece, end="", flush=True))
    print(flush=True)
    return reply


if __name__ == "__main__":
    sys.exit(main())
