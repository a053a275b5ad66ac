"""A local package index, and the archives that it serves."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.ucm.overlay.miniature import LICENCE, RELEASE, SOURCES

if TYPE_CHECKING:
    import ssl
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

#: Compiled code, which makes vLLM's wheels large and which the build never reads.
COMPILED = random.Random(0).randbytes(2_000_000)  # noqa: S311 - incompressible, and the same each time
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def wheel_name(release: str = RELEASE, tags: str = "cp38-abi3-manylinux_2_28_x86_64") -> str:
    return f"vllm-{release}-{tags}.whl"


def make_wheel(release: str = RELEASE, record: bytes | None = None, sources: dict[str, str] = SOURCES) -> bytes:
    """Return a wheel of the miniature vLLM, optionally with a given RECORD, or none if that is empty."""
    files = {path: (LICENCE + text).encode() for path, text in sources.items()}
    files["vllm/_C.abi3.so"] = COMPILED
    lines = "".join(f"{path},sha256={_encoded(data)},{len(data)}\n" for path, data in files.items())
    stated = lines.encode() if record is None else record
    if stated:
        files[f"vllm-{release}.dist-info/RECORD"] = stated
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return buffer.getvalue()


def make_sdist(release: str = RELEASE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        files = {path: LICENCE + text for path, text in SOURCES.items()}
        for path, text in {**files, "PKG-INFO": f"Name: vllm\nVersion: {release}\n"}.items():
            info = tarfile.TarInfo(f"vllm-{release}/{path}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@dataclass
class PackageIndex:
    """An index in a thread of its own.

    Attributes:
        archives: The archives of vLLM, by file name.
        yanked: The yanked archives.
        ranges: Whether it serves byte ranges.
        user: The required ``name:password``.
        hashes: Whether its page has hashes.
        tls: Serve https with these certificates.
        sent: The target of each request, and how many bytes of an archive it received.
    """

    archives: dict[str, bytes]
    yanked: tuple[str, ...] = ()
    ranges: bool = True
    user: str = ""
    hashes: bool = True
    tls: ssl.SSLContext | None = None
    sent: list[tuple[str, int]] = field(default_factory=list)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"index": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def place(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        """The value of `index-url`."""
        user = f"{self.user}@" if self.user else ""
        return f"{'https' if self.tls else 'http'}://{user}{self.place}/simple"

    @property
    def bytes_sent(self) -> int:
        return sum(count for _, count in self.sent)

    def page(self) -> bytes:
        links = [self._link(name, data) for name, data in self.archives.items()]
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

    def _link(self, name: str, data: bytes) -> str:
        digest = f"#sha256={hashlib.sha256(data).hexdigest()}" if self.hashes else ""
        yanked = ' data-yanked="broken"' if name in self.yanked else ""
        return f'<a href="../../files/{name}{digest}"{yanked}>{name}</a><br/>\n'

    def save(self, directory: Path) -> Path:
        """Write the archives to a directory, as `find-links` needs them."""
        directory.mkdir()
        for name, data in self.archives.items():
            (directory / name).write_bytes(data)
        return directory


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Ignore errors: clients disconnect as soon as they have what they need."""


class _Handler(BaseHTTPRequestHandler):
    index: PackageIndex
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        wanted = "Basic " + base64.b64encode(self.index.user.encode()).decode()
        if self.index.user and self.headers.get("Authorization") != wanted:
            self._answer(401, b"", {"WWW-Authenticate": "Basic"})
        elif path == "/simple/vllm/" and self.index.archives:
            self._answer(200, self.index.page(), {"Content-Type": "text/html"})
        elif path.startswith("/files/") and path.removeprefix("/files/") in self.index.archives:
            self._archive(self.index.archives[path.removeprefix("/files/")])
        else:
            self._answer(404, b"", {})

    def _archive(self, data: bytes) -> None:
        asked = RANGE.fullmatch(self.headers.get("Range", "")) if self.index.ranges else None
        if asked is None:
            self._answer(200, data, {}, archive=True)
            return
        size = len(data)
        start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
        end = min(int(asked[2]), size - 1) if asked[1] and asked[2] else size - 1
        part = data[start : end + 1]
        self._answer(206, part, {"Content-Range": f"bytes {start}-{end}/{size}"}, archive=True)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, archive: bool = False) -> None:
        self.index.sent.append((self.path, len(body) if archive else 0))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""
