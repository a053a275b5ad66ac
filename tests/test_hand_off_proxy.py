"""The example proxy before engines that are functions here."""

from __future__ import annotations

import asyncio
import json
import runpy
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip(
    "fastapi", reason="vLLM's packages are not installed; the end-to-end session runs these tests there"
)

import httpx

from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

PROXY = runpy.run_path(str(ROOT / "examples" / "hand_off" / "proxy.py"))
PREFILLS, DECODES = ("http://p1", "http://p2"), ("http://d1",)
PATH = "/v1/chat/completions"
BODY = {"messages": [], "max_tokens": 9, "min_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
HANDED = {"ucm_saved_tokens": 128}


class Engines:
    """All engines; what they were asked is kept, and ``prefill`` answers for the prefill engines."""

    def __init__(self, prefill: Callable[[httpx.Request], httpx.Response]) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._prefill = prefill

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.host, json.loads(request.content)))
        if request.url.host.startswith("p"):
            found = self._prefill(request)
            if found.status_code == httpx.codes.PROCESSING:
                await asyncio.Event().wait()
            return found
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"data: token\n\n")


def ask(engines: Engines, times: int = 1, seconds: float = 60.0) -> list[httpx.Response]:
    """Return the proxy's answers to requests, one after the other."""

    async def asked() -> list[httpx.Response]:
        proxy = PROXY["Proxy"](PREFILLS, DECODES, seconds)
        proxy.client = httpx.AsyncClient(transport=httpx.MockTransport(engines.answer))
        transport = httpx.ASGITransport(PROXY["create_app"](proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return [await client.post(PATH, json=BODY) for _ in range(times)]

    return asyncio.run(asked())


def test_a_prompt_is_prefilled_by_one_engine_and_decoded_by_another() -> None:
    engines = Engines(lambda _: httpx.Response(200, json={"kv_transfer_params": HANDED}))
    answers = ask(engines, 3)
    assert [answer.text for answer in answers] == ["data: token\n\n"] * 3
    assert answers[0].headers["content-type"].startswith("text/event-stream")
    assert [host for host, _ in engines.asked] == ["p1", "d1", "p2", "d1", "p1", "d1"]
    prefill, decode = (body for _, body in engines.asked[:2])
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert not {"min_tokens", "stream_options"} & set(prefill)
    assert decode == {**BODY, "kv_transfer_params": HANDED}


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


@pytest.mark.parametrize(
    "prefill",
    [
        gone,
        lambda _: httpx.Response(500),
        lambda _: httpx.Response(200, text="no JSON"),
        lambda _: httpx.Response(200, json={"kv_transfer_params": None}),
        lambda _: httpx.Response(httpx.codes.PROCESSING),  # it does not answer
    ],
)
def test_the_decode_engine_computes_what_no_other_did(prefill: Callable[[httpx.Request], httpx.Response]) -> None:
    engines = Engines(prefill)
    (answer,) = ask(engines, seconds=0.01)
    assert answer.text == "data: token\n\n"
    assert engines.asked[-1] == ("d1", BODY)


def test_a_decode_engine_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(gone)

    async def refuse(request: httpx.Request) -> httpx.Response:
        return gone(request)

    monkeypatch.setattr(engines, "answer", refuse)
    (answer,) = ask(engines)
    assert answer.status_code == httpx.codes.BAD_GATEWAY
    assert "http://d1 does not answer" in answer.json()["error"]
