"""Make connections with pip's settings; imported where one is made, because the import takes 0.1 s."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from remotezip import RemoteZip, RemoteZipError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from zipfile import ZipFile

    from transforms.pipeline.sources.pip_config import PipConfig


class _Session(requests.Session):
    """A session whose own certificates take precedence over those named by the environment.

    Closing it closes all responses, because a response that is rejected before it is read keeps its connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[requests.Response] = []

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        answer = super().send(request, **options)
        self._answers.append(answer)
        return answer

    def close(self) -> None:
        for answer in self._answers:
            answer.close()
        super().close()

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        own = self.verify if verify is None else verify
        return super().merge_environment_settings(url, proxies, stream, own, cert)


def open_session(config: PipConfig | None, url: str) -> requests.Session:
    """Open a session for one address.

    Args:
        config: pip's settings; None for none.
        url: The address; the certificate of a trusted host is not checked.
    """
    session = _Session()
    if config is None:
        return session
    session.verify = not _is_trusted(config, url) and (config.cert or True)
    session.cert = config.client_cert
    if config.proxy:
        session.proxies = {"http": config.proxy, "https": config.proxy}
        session.trust_env = False  # the environment's proxies would take precedence
    return session


@contextmanager
def remote_wheel(url: str, config: PipConfig | None) -> Iterator[ZipFile]:
    """Open a zip file of a server, which is read in ranges.

    Raises:
        OSError: It cannot be read, or the server does not serve ranges.
    """
    try:
        with (
            open_session(config, url) as session,
            RemoteZip(url, session=session, timeout=config.timeout if config else 30.0) as wheel,
        ):
            yield wheel
    except RemoteZipError as error:
        raise OSError(str(error)) from error


def _is_trusted(config: PipConfig, url: str) -> bool:
    parts = urlsplit(url)
    return not {parts.hostname, f"{parts.hostname}:{parts.port}"}.isdisjoint(config.trusted_hosts)
