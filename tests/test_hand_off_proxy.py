"""The example proxy before engines that are functions here."""

from __future__ import annotations

import asyncio
import json
import runpy
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("httpx", reason="vLLM's packages are not installed; the end-to-end session runs these tests there")

import fastapi
import httpx

from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROXY = runpy.run_path(str(ROOT / "examples" / "hand_off" / "proxy.py"))
PREFILLS, DECODES = ("http://p1", "http://p2"), ("http://d1",)
PATH = "/v1/chat/completions"
BODY = {"messages": [], "max_tokens": 9, "min_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
HANDED = {"ucm_saved_tokens": 128}
KEY = {"authorization": "Bearer secret"}
DECODED = "data: token\n\n"
SILENCE = 7.0


class Engines:
    """All engines; what they were asked is kept, and ``prefill`` answers for the prefill engines."""

    def __init__(self, prefill: Callable[[httpx.Request], httpx.Response]) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.left: list[str] = []  # where a request was ended before its answer
        self._prefill = prefill

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.host, json.loads(request.content)))
        self.keys.append(request.headers.get("authorization"))
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.left.append(request.url.host)
            raise

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.host.startswith("p"):
            found = self._prefill(request)
            if found.status_code == httpx.codes.PROCESSING:
                await asyncio.Event().wait()
            return found
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=DECODED)


def ask(
    engines: Engines,
    times: int = 1,
    seconds: float = 60.0,
    content: str | bytes = json.dumps(BODY),
    decodes: Sequence[str] = DECODES,
) -> list[httpx.Response]:
    """Return the proxy's answers to requests, one after the other."""

    async def asked() -> list[httpx.Response]:
        proxy = PROXY["Proxy"](PREFILLS, decodes, seconds, SILENCE)
        proxy.client = httpx.AsyncClient(transport=httpx.MockTransport(engines.answer))
        transport = httpx.ASGITransport(PROXY["create_app"](proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return [await client.post(PATH, content=content, headers=KEY) for _ in range(times)]

    return asyncio.run(asked())


def test_a_prompt_is_prefilled_by_one_engine_and_decoded_by_another() -> None:
    engines = Engines(lambda _: httpx.Response(200, json={"kv_transfer_params": HANDED}))
    answers = ask(engines, 3)
    assert [answer.text for answer in answers] == [DECODED] * 3
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
        lambda _: httpx.Response(200, json={"kv_transfer_params": ["ucm_saved_tokens"]}),
        lambda _: httpx.Response(200, json=[1]),
        lambda _: httpx.Response(httpx.codes.PROCESSING),  # it does not answer
    ],
)
def test_the_decode_engine_computes_what_no_other_did(prefill: Callable[[httpx.Request], httpx.Response]) -> None:
    engines = Engines(prefill)
    (answer,) = ask(engines, seconds=0.01)
    assert answer.text == DECODED
    assert engines.asked[-1] == ("d1", BODY)


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadTimeout])
def test_each_other_decode_engine_is_asked_once(error: type[httpx.TransportError]) -> None:
    class Dead(Engines):
        async def _answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.host in dead:
                assert request.extensions["timeout"]["read"] == SILENCE
                raise error("gone", request=request)
            return await super()._answer(request)

    dead, decodes = {"d1", "d3"}, ("http://d1", "http://d2", "http://d3")
    engines = Dead(gone)
    assert [answer.text for answer in ask(engines, 3, decodes=decodes)] == [DECODED] * 3
    asked = [host for host, _ in engines.asked]
    assert asked == ["p1", "d1", "d2", "p2", "d2", "p1", "d3", "d1", "d2"], "they take turns"
    dead.add("d2")
    engines.asked.clear()
    (answer,) = ask(engines, decodes=decodes)
    assert answer.status_code == httpx.codes.BAD_GATEWAY
    assert [host for host, _ in engines.asked] == ["p1", "d1", "d2", "d3"]
    message = answer.json()["error"]["message"]
    assert all(f"{one} does not answer" in message for one in decodes)


def test_a_client_asks_both_engines_to_retain_blocks_and_neither_where_to_find_kv() -> None:
    theirs = {"ucm_retain_seconds": 300, "ucm_saved_tokens": 7, "remote_host": "10.0.0.1", "do_remote_prefill": True}
    content = json.dumps({**BODY, "kv_transfer_params": theirs})
    engines = Engines(lambda _: httpx.Response(200, json={"kv_transfer_params": HANDED}))
    ask(engines, content=content)
    prefill, decode = (body["kv_transfer_params"] for _, body in engines.asked)
    assert prefill["ucm_retain_seconds"] == decode["ucm_retain_seconds"] == 300
    assert (prefill["remote_host"], prefill["do_remote_prefill"]) == (None, False)
    assert decode == {"ucm_retain_seconds": 300, **HANDED}
    engines = Engines(gone)
    ask(engines, content=content)
    assert engines.asked[-1][1]["kv_transfer_params"] == {"ucm_retain_seconds": 300, "ucm_saved_tokens": 7}


def test_engines_get_the_clients_key() -> None:
    engines = Engines(lambda _: httpx.Response(200, json={"kv_transfer_params": HANDED}))
    ask(engines)
    assert engines.keys == [KEY["authorization"]] * 2


@pytest.mark.parametrize("content", ["", "no JSON", "[1]", "null", '"text"', "\udcff", "[" * 100_000])
def test_what_is_no_request_is_refused_before_any_engine_is_asked(content: str) -> None:
    engines = Engines(gone)
    (answer,) = ask(engines, content=content.encode("utf-8", "surrogateescape"))
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "JSON" in answer.json()["error"]["message"]
    assert not engines.asked


@pytest.mark.parametrize("text", ["NaN", "-Infinity", '"\\ud800"', "1" + "0" * 400])
def test_the_engines_judge_what_else_json_may_contain(text: str) -> None:
    engines = Engines(lambda _: httpx.Response(200, json={"kv_transfer_params": HANDED}))
    (answer,) = ask(engines, content=f'{{"prompt": {text}}}')
    assert answer.text == DECODED
    assert [repr(body["prompt"]) for _, body in engines.asked] == [repr(json.loads(text))] * 2


@pytest.mark.parametrize("until", ["p1", "d1"])
def test_engines_are_spared_what_nobody_waits_for(until: str) -> None:
    """A client without a stream leaves while an engine computes."""

    class Stuck(Engines):
        async def _answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == until:
                left.set()
                await asyncio.Event().wait()
            return httpx.Response(200, json={"kv_transfer_params": HANDED})

    async def leave() -> int:
        proxy = PROXY["Proxy"](PREFILLS, DECODES, 60.0, SILENCE)
        proxy.client = httpx.AsyncClient(transport=httpx.MockTransport(engines.answer))
        body = [{"type": "http.request", "body": json.dumps({**BODY, "stream": False}).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "server": ("x", 1)}
        found = await asyncio.wait_for(proxy.complete(fastapi.Request(scope, receive)), 10.0)
        return int(found.status_code)

    left = asyncio.Event()
    engines = Stuck(gone)
    assert asyncio.run(leave()) == PROXY["GONE"]
    assert engines.left == [until]
    assert engines.asked[-1][0] == until
