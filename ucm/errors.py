"""The errors that are shown to an operator of vLLM: each says what went wrong, where, and what to do."""

from __future__ import annotations

import difflib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def pip_of(prefix: str, python: str) -> str:
    """Return the command that installs into an environment: one that uv has made contains no pip.

    Args:
        prefix: Its directory.
        python: Its interpreter.
    """
    try:
        settings = Path(prefix, "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        settings = []
    made_by_uv = any(line.partition("=")[0].strip() == "uv" for line in settings)
    return f"UV_PYTHON={shlex.quote(python)} uv pip" if made_by_uv else f"{python} -m pip"


#: This interpreter's pip, for messages: a bare `pip` may be that of another environment.
PIP = pip_of(sys.prefix, sys.executable)
#: The name of the runtime's distribution. No package index has it, so no message may tell anybody to install it by this
#: name: whoever registered it there would run code in vLLM.
RUNTIME = "ucm-runtime"


class UcmError(Exception):
    """An error that the user can act on.

    Args:
        what: What went wrong, in one sentence.
        where: The file, setting or module concerned; empty if the sentence says it.
        fix: What to do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  to do: {self.fix}")
        return "\n".join(lines)


class ConfigError(UcmError):
    """A setting is unknown, has the wrong type, or names something that does not exist."""


class SparseMethodError(UcmError):
    """A sparse method does not support the configuration or the request."""


def install_extra(name: str) -> str:
    """Return the command that installs what an extra of the runtime consists of, by these packages' own names.

    Args:
        name: The extra, as pyproject.toml names it.
    """
    from importlib import metadata  # noqa: PLC0415 - the hooks import this module, and nothing that takes time

    try:
        declared = metadata.requires(RUNTIME) or []
    except metadata.PackageNotFoundError:  # run from a checkout
        declared = []
    needs = [need.partition(";") for need in declared]
    wanted = [
        package.strip() for package, _, marker in needs if marker.replace("'", '"').strip() == f'extra == "{name}"'
    ]
    return f"{PIP} install {shlex.join(wanted or [f'<ucm_runtime wheel>[{name}]'])}"


def meant(given: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most like a given one, with a space behind it; empty if none is."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
