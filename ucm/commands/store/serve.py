"""``ucm store serve``: the commands about a prompt over HTTP, for routers and agents.

``POST /v1/lookup``, ``/v1/retain``, ``/v1/pin``, ``/v1/unpin``, ``/v1/prefetch``, ``/v1/demote`` and ``/v1/drop`` take
a JSON object with ``prompt`` (text, tokenized without a chat template) or ``tokens`` (token ids), ``salt`` if the
prompt's requests have one, and what the command takes besides: ``seconds`` (retain, pin) or ``from_token`` (unpin,
drop). They answer with what the command prints with ``--json``; an error has ``error``, ``where`` and ``fix``.
``/openapi.json`` describes it all.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ucm.commands.options import quieten, say, tokenize
from ucm.commands.store.prompt import ACTIONS, Prompt, describe
from ucm.errors import UcmError
from ucm.store.config import read_secret

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable
    from typing import Self

    from fastapi import FastAPI

    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.weightless import EngineFacts

_UNIX = "unix:"
#: Token ids of vLLM, and of ``ucm.hashing.request_hasher``.
_Token = Annotated[int, Field(ge=0, lt=1 << 32)]


class PromptBody(BaseModel):
    """The body of a request about a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    tokens: list[_Token] | None = None
    salt: str = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.tokens is None):
            raise ValueError("give either prompt or tokens")
        return self


class LeaseBody(PromptBody):
    """The body of ``retain`` and ``pin``."""

    seconds: float = Field(gt=0, allow_inf_nan=False)


class EndBody(PromptBody):
    """The body of ``unpin`` and ``drop``."""

    from_token: int = Field(default=0, ge=0)


def run(options: argparse.Namespace) -> int:
    """Serve until it is interrupted; 0.

    Raises:
        UcmError: The settings, the model, the address or the token cannot be used.
    """
    quieten()
    token = read_secret(options.token_file, None, "--token-file")
    if not token and not options.listen.startswith(_UNIX):
        raise UcmError(
            "whoever reaches this address could delete blocks", where="--listen", fix="give --token-file, or unix:PATH"
        )
    described = describe(options.config, options.model, options.engine_args)
    app = application(described, options.model, token)
    import uvicorn  # noqa: PLC0415 - vLLM brings it

    with closing(listening(options.listen)) as one:
        say([f"listening on {options.listen}"])
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[one])
    return 0


#: The body of each command's request.
BODIES: dict[str, type[PromptBody]] = {
    **dict.fromkeys(("lookup", "prefetch", "demote"), PromptBody),
    **dict.fromkeys(("retain", "pin"), LeaseBody),
    **dict.fromkeys(("unpin", "drop"), EndBody),
}


def application(described: tuple[ConnectorConfig, EngineFacts], model: Path, token: str = "") -> FastAPI:
    """Return the application.

    Args:
        described: The engines' settings, and what they would name and store.
        model: The model's directory, whose tokenizer is used.
        token: The bearer token that every request must have; empty for none.

    Raises:
        UcmError: FastAPI is not installed.
    """
    try:
        from fastapi import Depends, FastAPI, Request, Response  # noqa: PLC0415 - vLLM brings it
        from fastapi.exceptions import RequestValidationError  # noqa: PLC0415 - likewise
        from fastapi.responses import JSONResponse  # noqa: PLC0415 - likewise
        from fastapi.security import HTTPBearer  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise UcmError(
            f"FastAPI cannot be imported: {error}", fix="run this in the environment that serves the model"
        ) from error
    bearer = HTTPBearer(auto_error=False)
    # A dependency describes the token in /openapi.json, but it would be checked after the body was read.
    app = FastAPI(title="UCM store", docs_url=None, redoc_url=None, dependencies=[Depends(bearer)])

    @app.middleware("http")
    async def authenticate(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        given = await bearer(request)
        said = "" if given is None else given.credentials
        if token and not hmac.compare_digest(said.encode(), token.encode()):
            wrong = {"detail": "the bearer token is wrong or missing"}
            return JSONResponse(wrong, 401, {"WWW-Authenticate": "Bearer"})
        return await answer(request)

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        # Not what was given, which may be a salt, and ends in the client's log.
        wrong = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
        return JSONResponse({"detail": wrong}, 422)

    @app.exception_handler(UcmError)
    def refuse(_: Request, error: UcmError) -> JSONResponse:
        return JSONResponse({"error": error.what, "where": error.where, "fix": error.fix}, 400)

    @app.exception_handler(OSError)
    def unreadable(_: Request, error: OSError) -> JSONResponse:
        return JSONResponse({"error": f"the store cannot be read: {error}", "where": "", "fix": ""}, 503)

    def serve(name: str) -> Callable[[PromptBody], dict[str, Any]]:
        def answer(body: PromptBody) -> dict[str, Any]:
            tokens = body.tokens if body.prompt is None else tokenize(model, body.prompt)
            asked = Prompt(*described, tokens or [], body.salt)
            return ACTIONS[name][0](asked, **body.model_dump(exclude={"prompt", "tokens", "salt"}))

        answer.__annotations__["body"] = BODIES[name]
        return answer

    # Plain functions: FastAPI runs them in threads, because the store waits for disks and servers.
    for name, (action, _) in ACTIONS.items():
        app.post(f"/v1/{name}", name=name, description=action.__doc__)(serve(name))
    return app


def listening(address: str) -> socket.socket:
    """Return a socket that listens at ``unix:PATH`` or ``HOST:PORT``.

    Raises:
        UcmError: The address cannot be used.
    """
    try:
        if address.startswith(_UNIX):
            return _listening_at(Path(address.removeprefix(_UNIX)))
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), _port(port)), family=family)
    except (OSError, ValueError) as error:
        raise UcmError(
            f"cannot listen: {error}", where=f"--listen {address}", fix="write unix:/run/ucm/store.sock or HOST:PORT"
        ) from error


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 1 << 16:
        raise ValueError("there is no such port")
    return number


def _listening_at(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX) as other:
                if other.connect_ex(str(path)) == 0:
                    raise OSError("another process listens there")
            path.unlink()  # of one that is gone
    one = socket.socket(socket.AF_UNIX)
    try:
        before = os.umask(0o077)  # who may connect is decided by the socket's permissions
        try:
            one.bind(str(path))
        finally:
            os.umask(before)
        one.listen()
    except BaseException:
        one.close()
        raise
    return one
