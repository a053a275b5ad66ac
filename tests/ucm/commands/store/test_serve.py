"""``ucm store serve``: the commands about a prompt over HTTP."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import uvicorn

from tests.ports import free_port
from tests.ucm.commands.described import SIZE, TOKENS, described, keys  # noqa: F401 - a fixture
from tests.ucm.commands.store.test_lookup import config, prompt  # noqa: F401 - fixtures
from tests.ucm.store.keys import key_file
from ucm.commands.store import serve
from ucm.commands.store.prompt import Prompt, describe
from ucm.errors import UcmError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.ucm.commands.store.conftest import Answer

pytestmark = pytest.mark.usefixtures("described")


@pytest.fixture
def post(config: Path) -> Callable[..., httpx2.Response]:  # noqa: F811 - a fixture
    """Ask the application, without a network."""

    def post(action: str, body: object, token: str = "", sent: str | None = None) -> httpx2.Response:
        app: Any = serve.application(describe(config, Path("/m"), {}), Path("/m"), token)
        headers = {} if sent is None else {"authorization": f"Bearer {sent}"}

        async def ask() -> httpx2.Response:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://ucm") as client:
                return await client.post(f"/v1/{action}", json=body, headers=headers)

        return asyncio.run(ask())

    return post


def test_each_command_answers_as_it_prints(
    post: Callable[..., httpx2.Response],
    ask: Callable[..., Answer],
    config: Path,  # noqa: F811 - fixtures
    prompt: Path,  # noqa: F811
) -> None:
    body = {"tokens": TOKENS}
    printed = ask("lookup", "--json", "--config", config, "--model", "/m", "--tokens", prompt).data
    assert post("lookup", body).json() == printed
    assert post("prefetch", body).json()["there"] == 3
    assert post("retain", {**body, "seconds": 60.0}).json()["tiers"]["Posix"]["leased"] == 4
    assert post("pin", {**body, "seconds": 60}).json()["tiers"]["Posix"]["leased"] == 4
    assert post("unpin", body).json()["tiers"]["Posix"]["ended"] == 4
    assert post("demote", body).json()["deleted"] == 3
    assert post("drop", {**body, "from_token": 2 * SIZE}).json()["dropped"] == {"Cache": 0, "Posix": 2}
    assert post("lookup", body).json()["found_tokens"] == 2 * SIZE
    assert post("lookup", {**body, "salt": "other"}).json()["found_tokens"] == 0


def test_a_prompt_is_tokenized(post: Callable[..., httpx2.Response], monkeypatch: pytest.MonkeyPatch) -> None:
    def to_tokens(model: Path, text: str) -> list[int]:
        assert (model, text) == (Path("/m"), "a prompt")
        return TOKENS

    monkeypatch.setattr(serve, "tokenize", to_tokens)
    assert post("lookup", {"prompt": "a prompt"}).json()["found_tokens"] == 3 * SIZE


@pytest.mark.parametrize(
    ("action", "body", "says"),
    [
        ("lookup", {}, "give either prompt or tokens"),
        ("lookup", {"prompt": "a", "tokens": [1]}, "give either prompt or tokens"),
        ("lookup", {"tokens": [-1]}, "greater than or equal to 0"),
        ("lookup", {"tokens": [1 << 32]}, "less than 4294967296"),
        ("lookup", {"tokens": ["1"]}, "valid integer"),
        ("lookup", {"tokens": [1], "slat": "a secret"}, "Extra inputs"),
        ("pin", {"tokens": [1], "salt": "a secret"}, "Field required"),
        ("pin", {"tokens": [1], "salt": ["a secret"], "seconds": 1}, "valid string"),
        ("pin", {"tokens": [1]}, "Field required"),
        ("pin", {"tokens": [1], "seconds": 0}, "greater than 0"),
        ("drop", {"tokens": [1], "from_token": -1}, "greater than or equal to 0"),
        ("drop", [1], "valid dictionary"),
    ],
)
def test_a_wrong_body_is_refused(post: Callable[..., httpx2.Response], action: str, body: Any, says: str) -> None:
    answer = post(action, body)
    assert answer.status_code == 422
    assert says in answer.text
    assert "a secret" not in answer.text


def test_an_error_says_what_where_and_what_to_do(
    post: Callable[..., httpx2.Response],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = post("pin", {"tokens": TOKENS, "seconds": 1e6})
    assert (answer.status_code, answer.json()["where"]) == (400, "the time")
    assert "1e+06 seconds is too long" in answer.json()["error"]
    assert "lease_seconds" in answer.json()["fix"]

    def find(self: Prompt) -> Any:
        raise PermissionError(13, "Permission denied", "/kv")

    monkeypatch.setattr(Prompt, "_find", find)
    answer = post("lookup", {"tokens": TOKENS})
    assert (answer.status_code, "Permission denied: '/kv'" in answer.json()["error"]) == (503, True)


@pytest.mark.parametrize(("sent", "code"), [(None, 401), ("other", 401), ("", 401), ("secret", 200)])
def test_the_token_is_demanded(post: Callable[..., httpx2.Response], sent: str | None, code: int) -> None:
    assert post("lookup", {"tokens": TOKENS}, "secret", sent).status_code == code


def test_without_the_token_nothing_is_told_and_no_body_is_read(config: Path) -> None:  # noqa: F811 - a fixture
    app: Any = serve.application(describe(config, Path("/m"), {}), Path("/m"), "secret")
    read = list[int]()

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1000):
            read.append(number)
            yield b"[1,"

    async def ask() -> list[int]:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://ucm") as client:
            answers = [await client.get("/openapi.json"), await client.post("/v1/drop", content=endless())]
        return [answer.status_code for answer in answers]

    assert asyncio.run(ask()) == [401, 401]
    assert not read


def test_a_network_address_needs_a_token(ask: Callable[..., Answer], config: Path, tmp_path: Path) -> None:  # noqa: F811
    where = ("serve", "--config", config, "--model", "/m", "--listen")
    answer = ask(*where, "127.0.0.1:8101")
    assert (answer.code, "whoever reaches this address could delete blocks" in answer.err) == (2, True)
    public = tmp_path / "token"
    public.write_text("secret\n", encoding="utf-8")
    public.chmod(0o644)
    answer = ask(*where, "127.0.0.1:8101", "--token-file", public)
    assert (answer.code, "other users can read" in answer.err) == (2, True)
    for wrong in ("nowhere", "127.0.0.1:port", "127.0.0.1:99999", f"unix:{tmp_path}/none/s", f"unix:{tmp_path}"):
        answer = ask(*where, wrong, "--token-file", key_file(tmp_path / "key"))
        assert (answer.code, "cannot listen" in answer.err) == (2, True), wrong


def test_it_listens_where_only_this_user_may_connect(
    ask: Callable[..., Answer],
    config: Path,  # noqa: F811 - a fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "store.sock"
    served: list[int] = []

    def serve_them(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        (one,) = sockets
        served.append(stat.S_IMODE(path.stat().st_mode))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(UcmError, match="another process listens there"):
            serve.listening(f"unix:{path}")
        assert one.getsockname() == str(path)

    monkeypatch.setattr(uvicorn.Server, "run", serve_them)
    for _ in range(2):  # the second time, the socket of a process that is gone is in the way
        answer = ask("serve", "--config", config, "--model", "/m", "--listen", f"unix:{path}")
        assert (answer.code, answer.out) == (0, f"listening on unix:{path}\n"), answer.err
    assert served == [0o700, 0o700]


def test_it_listens_on_a_network_address() -> None:
    with serve.listening(f"127.0.0.1:{free_port()}") as one:
        assert one.getsockname()[0] == "127.0.0.1"
