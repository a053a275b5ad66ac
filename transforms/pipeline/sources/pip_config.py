"""Read the operator's package-index settings from pip.

Operators configure the index, the mirror, the proxy and the certificates for pip. `pip config list` merges pip's files
and environment in pip's own order, so nothing has to be configured a second time.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from transforms.pipeline.sources.tree import SourceError

#: pip's precedence for an option: the environment, then the command's section, then the global one.
SECTIONS = (":env:", "install", "download", "global")
#: How the variables begin that pip's answers depend on: its options, and where its files are.
_HEEDED = ("PIP_", "HOME", "XDG_", "PYTHON", "VIRTUAL_ENV", "APPDATA", "USERPROFILE", "PROGRAMDATA", "ALLUSERSPROFILE")


@dataclass(frozen=True)
class PipConfig:
    """pip's settings for reaching an index.

    Attributes:
        index_urls: The index and the extra indexes, in pip's order; empty with ``no-index``.
        find_links: Further places to look for archives.
        trusted_hosts: Hosts whose certificate is not checked.
        cert: A CA bundle, or None for the default.
        client_cert: A client certificate with its key, or None.
        proxy: A proxy for every request, or None.
        timeout: Seconds for one connection.
    """

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    timeout: float = 30.0


def read_pip_config() -> PipConfig:
    """Read the settings of this interpreter's pip.

    Raises:
        SourceError: pip is missing or does not answer.
    """
    values = _settings(_pip("config", "list"))

    def first(option: str) -> str | None:
        return next((values[f"{section}.{option}"] for section in SECTIONS if f"{section}.{option}" in values), None)

    def words(option: str) -> tuple[str, ...]:
        return tuple((first(option) or "").split())

    no_index = (first("no-index") or "").lower() in {"1", "true", "yes", "on"}
    index = first("index-url") or ("" if no_index else _default_index())
    return PipConfig(
        index_urls=() if no_index else (index, *words("extra-index-url")),
        find_links=words("find-links"),
        trusted_hosts=words("trusted-host"),
        cert=first("cert"),
        client_cert=first("client-cert"),
        proxy=first("proxy"),
        timeout=float(first("timeout") or first("default-timeout") or 30.0),
    )


def _pip(*arguments: str) -> str:
    heeded = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_HEEDED)))
    return _asked(sys.executable, arguments, heeded)


@functools.cache
def _asked(python: str, arguments: tuple[str, ...], heeded: tuple[tuple[str, str], ...]) -> str:
    """Return what pip prints; it is started once for each environment, because each release of a run asks again."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    del heeded  # of the environment, what its answer depends on
    wide = {**os.environ, "COLUMNS": "1000"}  # otherwise pip wraps the help in the middle of an address
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=wide)  # noqa: S603 - fixed words
    if done.returncode:
        raise SourceError(
            "pip failed, so your package index is unknown",
            where=f"{python} -m pip {' '.join(arguments)}: {done.stderr.strip()[-400:]}",
            fix="install pip in this environment, or name the sources with --from PATH",
        )
    return done.stdout


def _settings(listing: str) -> dict[str, str]:
    """Parse the ``section.option='value'`` lines of `pip config list`."""
    settings = {}
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        if separator:
            settings[name.strip()] = str(ast.literal_eval(value))
    return settings


def _default_index() -> str:
    """Return pip's index when nothing is configured, which only its help text states."""
    found = re.search(r"\(default\s+(https?://[^\s)]+)\)", _pip("install", "--help"))
    if found is None:
        raise SourceError(
            "pip's default package index could not be read from its help",
            where=f"{sys.executable} -m pip install --help",
            fix="set the index for pip (`pip config set global.index-url URL`), or name the sources with --from PATH",
        )
    return found.group(1)
