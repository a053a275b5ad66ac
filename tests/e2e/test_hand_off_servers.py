"""The example proxy before two prefill servers and one that decodes, with a trained model in float32.

The answers are those of one server, also after a prefill server was killed while it computed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.real.chat import Reply, Server
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

PROXY = ROOT / "examples" / "hand_off" / "proxy.py"
#: Characters of the document in each prompt: some 800 tokens. A block has 128.
CHARACTERS = 4000


class Servers:
    """Prefill servers, the one that decodes, and the proxy before them."""

    def __init__(self, prefills: list[Server], decode: Server, proxy: Server) -> None:
        self.prefills, self.decode, self.proxy = prefills, decode, proxy

    def ask(self, number: int, **more: Any) -> tuple[Reply, Reply]:
        """Return the answers of the proxy and of one server, which computes the prompt or most of it itself."""
        from tests.e2e.real.chat import BOAT, HANDBOOK, chat  # noqa: PLC0415 - needs the build's packages

        text = f"Copy {number}. " + HANDBOOK.read_text(encoding="utf-8")[:CHARACTERS]
        body = {**chat(BOAT, text=text, tokens=24), **more}
        return self.proxy.ask(body), self.prefills[-1].ask(body)


@pytest.fixture(scope="module")
def servers(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    from tests.e2e.demo import demo_environment, prepare  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.real.chat import Server, serve_command  # noqa: PLC0415
    from tests.e2e.real.model import real_model  # noqa: PLC0415
    from tests.ports import free_port  # noqa: PLC0415

    base = tmp_path_factory.mktemp("servers")
    environment, model, transfer = demo_environment(environments.release), real_model(), prepare(base / "ours")
    ours = ("UCM_", "VLLM_", "PYTHON", "PYTEST_")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    made, addresses = [], []
    for role in ("kv_producer", "kv_producer", "kv_consumer"):
        port = free_port()
        command = f"{serve_command(environment, model, {**transfer, 'kv_role': role}, port)} --max-model-len 2048"
        made.append(Server(command, port, base / f"{port}.txt", variables))
        addresses.append(f"http://127.0.0.1:{port}")
    port = free_port()
    start = [str(environment.python), str(PROXY), "--prefill", *addresses[:2], "--decode", addresses[2]]
    proxy = Server(shlex.join([*start, "--port", str(port)]), port, base / "proxy.txt", variables)
    with contextlib.ExitStack() as running:
        with ThreadPoolExecutor() as starting:
            *prefills, decode, proxy = starting.map(running.enter_context, [*made, proxy])
        yield Servers(prefills, decode, proxy)


@pytest.mark.parametrize("number", range(2))
def test_what_a_prefill_server_computed_is_loaded(servers: Servers, number: int) -> None:
    through, alone = servers.ask(number, min_tokens=2)
    assert through.text == alone.text
    assert through.cached == (through.prompt - 1) // 128 * 128 > 0


def test_a_prefill_server_that_is_killed_costs_no_answer(servers: Servers) -> None:
    """The first and the third of these are sent to it: while it lives, and when it is gone."""
    timer = threading.Timer(0.5, servers.prefills[0].kill)
    timer.start()
    for number in range(10, 13):
        through, alone = servers.ask(number)
        assert through.text == alone.text
    timer.join()
