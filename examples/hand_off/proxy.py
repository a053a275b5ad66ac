"""A proxy before engines that prefill and engines that decode, with packages that `vllm serve` needs anyway.

    python proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

A prefill engine gets each request first, and generates one token. Its answer says where the prompt's KV is
(``kv_transfer_params``); with that, a decode engine gets the request, and the client the decode engine's answer. The
engines of each kind take turns. If a prefill engine fails, the decode engine computes the prompt; if a decode engine
does not begin to answer, the next one is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence

logger = logging.getLogger("uvicorn.error")

#: What vLLM's connectors expect of a request that another engine decodes.
DECODED_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Parameters that do not go with one token, or that would only cost time.
ONLY_TO_DECODE = ("stream_options", "min_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n", "best_of")
#: How the names of UCM's own parameters begin: what a client may ask of both engines, for instance to retain blocks.
#: Where a prompt's KV is, no client may say.
FROM_CLIENTS = "ucm_"
#: The status of an answer to a client that is gone, which nobody gets.
GONE = 499


def taken_apart(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request without its ``kv_transfer_params``, and those of them that a client may give."""
    rest = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    params = body.get("kv_transfer_params")
    given = params if isinstance(params, dict) else {}
    return rest, {name: value for name, value in given.items() if name.startswith(FROM_CLIENTS)}


def to_prefill(body: Mapping[str, Any], wishes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for a prefill engine: the same prompt, and one token."""
    kept = {name: value for name, value in body.items() if name not in ONLY_TO_DECODE}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": {**wishes, **DECODED_ELSEWHERE}}


def refusal(message: str, status: int) -> Response:
    """Return an error as OpenAI's API has it."""
    return JSONResponse({"error": {"message": message, "type": "proxy_error", "code": status}}, status)


class Proxy:
    """The proxy's requests.

    Args:
        prefills: The addresses of the prefill engines.
        decodes: The addresses of the decode engines.
        seconds: How long a prefill may take; then the decode engine computes the prompt.
        silence: For how many seconds a decode engine may send nothing; without a stream, that is its whole time.
    """

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], seconds: float, silence: float) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), deque(decodes)
        self._seconds, self._patience = seconds, httpx.Timeout(silence, connect=5.0)
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None)
        )

    async def complete(self, request: Request) -> Response:
        """Answer a completion or a chat, unless its client leaves: then both engines are spared the rest."""
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return refusal(f"the request is no JSON: {error}", 400)
        if not isinstance(body, dict):
            return refusal(f"the request is a {type(body).__name__} in JSON, not an object", 400)
        return await _unless_gone(request, self._answer(request, body))

    async def _answer(self, request: Request, body: dict[str, Any]) -> Response:
        rest, wishes = taken_apart(body)
        path, headers = request.url.path, _headers(request)
        params = {**wishes, **await self._prefill(path, headers, to_prefill(rest, wishes))}
        sent = {**rest, "kv_transfer_params": params} if params else rest
        content, failures = json.dumps(sent), list[str]()
        turns = tuple(self._decodes)
        self._decodes.rotate(-1)
        for decode in turns:
            try:
                call = self.client.build_request(
                    "POST", decode + path, content=content, headers=headers, timeout=self._patience
                )
                answer = await self.client.send(call, stream=True)
            except httpx.HTTPError as error:
                failures.append(f"{decode} does not answer: {error!r}")
                continue
            kind = answer.headers.get("content-type")
            return StreamingResponse(_pieces(answer), answer.status_code, media_type=kind)
        return refusal("; ".join(failures), 502)

    async def _prefill(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
        """Let a prefill engine compute a prompt; return what it hands over, nothing if it fails or is late."""
        engine = next(self._prefills)
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self.client.post(engine + path, content=json.dumps(body), headers=headers)
            answer.raise_for_status()
            found = answer.json()
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            logger.warning("%s failed, the decode engine computes the prompt: %r", engine, error)
            return {}
        params = found.get("kv_transfer_params") if isinstance(found, dict) else None
        return params if isinstance(params, dict) else {}


def _headers(request: Request) -> dict[str, str]:
    """Return the headers for the engines: they ask for the client's key if they have one (``--api-key``)."""
    key = request.headers.get("authorization")
    return {"content-type": "application/json"} | ({"authorization": key} if key else {})


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do the work for a request, or end it once the client is gone: without a stream, nothing else would notice."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=GONE)
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    """Return when the client of a request, whose body was read, is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Pass an answer on as it comes; end it at its engine if the client is gone."""
    try:
        async for piece in answer.aiter_bytes():
            yield piece
    finally:
        await answer.aclose()


def create_app(proxy: Proxy) -> FastAPI:
    """Create the web application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with proxy.client:
            yield

    async def health() -> Response:
        return Response()

    app = FastAPI(lifespan=lifespan)
    app.add_api_route("/health", health)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, proxy.complete, methods=["POST"], response_model=None)
    return app


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="the prefill engines")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="the decode engines")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-seconds", type=float, default=120.0, help="then the decode engine computes")
    parser.add_argument("--decode-seconds", type=float, default=600.0, help="so long may a decode engine be silent")
    options = parser.parse_args()
    app = create_app(Proxy(options.prefill, options.decode, options.prefill_seconds, options.decode_seconds))
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
