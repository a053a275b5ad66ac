"""Read secrets from a file or from the environment, without ever showing them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ucm.errors import ConfigError


def read_secret(
    file: str | None, variable: str | None, where: str, *, is_key: bool = False, owners: frozenset[int] = frozenset()
) -> str:
    """Return the first line of a file or an environment variable's value; empty if neither is named.

    Args:
        file: The path of the file; ``~`` is expanded.
        variable: The name of the variable.
        where: The setting, for messages.
        is_key: Whether whoever can change the file can forge answers: then it must belong to this user or to root, and
            no group may write to it.
        owners: The ids of other users to whom a key may belong.

    Raises:
        ConfigError: The file cannot be read, others may read it, or the variable is not set.
    """
    if file is not None:
        path = Path(file).expanduser()
        try:
            with open(path, encoding="utf-8", opener=_open) as opened:
                status = os.fstat(opened.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ConfigError("this is no file", where=f"{where}: {path}", fix="name a file with a secret")
                if status.st_mode & (0o027 if is_key else 0o007):
                    raise ConfigError(
                        "this file contains a secret, but other users can read or change it",
                        where=f"{where}: {path}",
                        fix=f"chmod 600 {path}",
                    )
                if is_key and status.st_uid not in {0, os.geteuid(), *owners}:
                    raise ConfigError(
                        f"this file contains a key, but belongs to user {status.st_uid}, who can change it",
                        where=f"{where}: {path}",
                        fix=f"let it belong to this user, {os.geteuid()}, or to root",
                    )
                secret = opened.readline().rstrip("\r\n")
        except (OSError, ValueError) as error:
            reasons = {UnicodeDecodeError: "it is not UTF-8", ValueError: "its name contains a null character"}
            reason = getattr(error, "strerror", None) or reasons.get(type(error), str(error))
            raise ConfigError(
                f"a file with a secret cannot be read: {reason}",
                where=f"{where}: {file!r}",
                fix="name a text file that this user can read, whose first line is the secret",
            ) from None
        if not secret:
            raise ConfigError(
                "a file with a secret has an empty first line",
                where=f"{where}: {path}",
                fix="write the secret into its first line",
            )
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


def _open(path: str, flags: int) -> int:
    """Open a file; a FIFO is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
