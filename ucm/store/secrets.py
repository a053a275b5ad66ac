"""Read secrets from a file or from the environment, without ever showing them."""

from __future__ import annotations

import os
from pathlib import Path

from ucm.errors import ConfigError


def read_secret(file: str | None, variable: str | None, where: str) -> str:
    """Return the first line of a file or an environment variable's value; empty if neither is named.

    Args:
        file: The path of the file; ``~`` is expanded.
        variable: The name of the variable.
        where: The setting, for messages.

    Raises:
        ConfigError: The file cannot be read, others may read it, or the variable is not set.
    """
    if file is not None:
        path = Path(file).expanduser()
        try:
            with path.open(encoding="utf-8") as opened:
                if os.fstat(opened.fileno()).st_mode & 0o007:
                    raise ConfigError(
                        "this file contains a secret, but other users can read or change it",
                        where=f"{where}: {path}",
                        fix=f"chmod 600 {path}",
                    )
                secret = opened.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"a file with a secret cannot be read: {reason}", where=f"{where}: {path}") from None
        if not secret:
            raise ConfigError("a file with a secret has an empty first line", where=f"{where}: {path}")
        return secret
    if variable is not None:
        if not os.environ.get(variable):
            raise ConfigError(
                f"the environment variable {variable} is not set, but must contain a secret",
                where=where,
                fix="set it in the environment of vLLM",
            )
        return os.environ[variable]
    return ""
