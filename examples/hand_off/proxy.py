"""A proxy before engines that prefill and engines that decode, with packages that `vllm serve` needs anyway.

    python proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

A prefill engine gets each request first, and generates one token. Its answer says where the prompt's KV is
(``kv_transfer_params``); with that, a decode engine gets the request, and the client the decode engine's answer. The
engines of each kind take turns. If a prefill engine fails, the decode engine computes the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

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


def to_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request for a prefill engine: the same prompt, and one token."""
    kept = {name: value for name, value in body.items() if name not in ONLY_TO_DECODE}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": DECODED_ELSEWHERE}


class Proxy:
    """The proxy's requests.

    Args:
        prefills: The addresses of the prefill engines.
        decodes: The addresses of the decode engines.
        seconds: How long a prefill may take; then the decode engine computes the prompt.
    """

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], seconds: float) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), itertools.cycle(decodes)
        self._seconds = seconds
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None)
        )

    async def complete(self, request: Request) -> Response:
        """Answer a completion or a chat."""
        body, path = await request.json(), request.url.path
        params = await self._prefill(path, body)
        sent = body if params is None else {**body, "kv_transfer_params": params}
        decode = next(self._decodes)
        try:
            answer = await self.client.send(self.client.build_request("POST", decode + path, json=sent), stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": f"{decode} does not answer: {error!r}"}, 502)
        return StreamingResponse(_pieces(answer), answer.status_code, media_type=answer.headers.get("content-type"))

    async def _prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Let a prefill engine compute a prompt; return what it hands over, or None if it fails or is late."""
        engine = next(self._prefills)
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self.client.post(engine + path, json=to_prefill(body))
            answer.raise_for_status()
            found: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            logger.warning("%s failed, the decode engine computes the prompt: %r", engine, error)
            return None
        return found


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
    options = parser.parse_args()
    app = create_app(Proxy(options.prefill, options.decode, options.prefill_seconds))
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
