"""Find the published archives of a release on the operator's package index."""

from __future__ import annotations

import functools
import logging
import ssl
from typing import TYPE_CHECKING, Any, cast

import httpx2
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from unearth import Link, PackageFinder
from unearth.collector import LinkCollectError
from unearth.fetchers import PyPIClient

from transforms.pipeline.sources.pip_config import PipConfig, read_pip_config
from transforms.pipeline.sources.tree import Archive, SourceError, parse_release
from transforms.registry import VLLM

if TYPE_CHECKING:
    from unearth import Package as Found
    from unearth.fetchers import Fetcher

    from transforms.engine.registry import Package

CONFIGURED = "the index that `python -m pip config list` shows"
# unearth warns of each place that lacks the project; our own error names these places if none has it.
logging.getLogger("unearth").addHandler(logging.NullHandler())


class Index:
    """The package index that pip is configured for.

    Args:
        config: pip's settings; read from pip by default.
        package: The package to look for.
    """

    def __init__(self, config: PipConfig | None = None, package: Package = VLLM) -> None:
        self.package = package
        self.config = config or read_pip_config()

    def releases(self) -> list[str]:
        """Return all published versions, newest first."""
        found = {p.version for p in self._packages if p.version and not p.link.is_yanked}
        return sorted(found, key=Version, reverse=True)

    def archives(self, release: str) -> list[Archive]:
        """Return a release's archives in order of preference: the wheel that pip would choose first, then the sdist.

        A package may prefer its sdist.

        Raises:
            SourceError: The index cannot be reached or does not have the release.
        """
        wanted = parse_release(release)
        found = [p for p in self._packages if p.version and Version(p.version) == wanted]
        if not found:
            raise self._unknown(release)
        return [_archive(package.link) for package in sorted(found, key=self._preference)]

    @functools.cached_property
    def _packages(self) -> list[Found]:
        config = self.config
        with _Client(config) as client:
            finder = PackageFinder(
                session=cast("Fetcher", client),
                index_urls=config.index_urls,
                find_links=config.find_links,
                ignore_compatibility=True,
            )
            if not config.index_urls and not config.find_links:
                finder.sources.clear()  # otherwise unearth asks the public index, which pip is configured not to do
            found = finder.find_all_packages(self.package.project, allow_yanked=True)
            packages = [p for p in found if self._is_it(p)]
        if not packages:
            raise SourceError(
                f"no package index with {self.package.title} can be reached, and the release is not in the cache",
                where="; ".join(client.problems) or CONFIGURED,
                fix="check the network, the proxy and pip's index settings; or build from a copy that you have: "
                "--from PATH (a virtual environment, a directory, a wheel, an sdist)",
            )
        return packages

    def _is_it(self, found: Found) -> bool:
        return canonicalize_name(found.name) == self.package.project and _parses(found.version)

    def _preference(self, found: Found) -> tuple[int, int]:
        """Return a sort key: wheels before the sdist, x86-64 first, then the highest build number, as pip does."""
        if not found.link.is_wheel:
            return (-1 if self.package.sdist_first else 2, 0)
        _, _, build, tags = parse_wheel_filename(found.link.filename)
        x86 = any(tag.platform.endswith("x86_64") for tag in tags)
        return (0 if x86 else 1, -(build[0] if build else 0))

    def _unknown(self, release: str) -> SourceError:
        newest = ", ".join(self.releases()[:5])
        return SourceError(
            f"the package index has no {self.package.title} {release}",
            where=CONFIGURED,
            fix=f"name a published release (newest: {newest}), or build from a copy that you have with --from PATH",
        )


class _Client(PyPIClient):
    """A client that notes places that do not answer and lets the finder continue with the next one."""

    def __init__(self, config: PipConfig) -> None:
        self.problems: list[str] = []
        proxied = httpx2.HTTPTransport(verify=False, cert=config.client_cert, proxy=config.proxy)
        super().__init__(
            trusted_hosts=config.trusted_hosts,
            verify=_verify(config),
            cert=config.client_cert,
            timeout=config.timeout,
            proxy=config.proxy,
            # without the mounts, a trusted host would be reached past the proxy
            mounts={f"all://{host}": proxied for host in config.trusted_hosts} if config.proxy else {},
        )

    def get(self, url: Any, **options: Any) -> httpx2.Response:
        place = Link(str(url)).redacted
        try:
            answer = super().get(url, **options)
        except httpx2.HTTPError as error:
            self.problems.append(f"{place}: {error}")
            raise LinkCollectError(str(error)) from error
        if answer.is_error:
            self.problems.append(f"{place}: {answer.status_code} {answer.reason_phrase}")
        return answer


def _parses(version: str | None) -> bool:
    try:
        return version is not None and bool(Version(version))
    except InvalidVersion:
        return False


def _archive(link: Link) -> Archive:
    stated = (link.hash_option or {}).get("sha256", [])
    return Archive(link.filename, link.url_without_fragment, stated[0] if stated else "", link.is_wheel)


def _verify(config: PipConfig) -> ssl.SSLContext | bool:
    try:
        return ssl.create_default_context(cafile=config.cert) if config.cert else True
    except OSError as error:
        raise SourceError(
            "the certificates in pip's configuration cannot be read",
            where=f"{config.cert}: {error}",
            fix="correct pip's `cert` setting (`python -m pip config list`)",
        ) from error
