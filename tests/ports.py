"""Ports for the servers that tests and the demo start; it needs only the standard library."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import tempfile
from pathlib import Path

#: Below those that Linux gives to a program that asks for any port.
PORTS = range(10_000, 32_768)
_PORTS = itertools.islice(itertools.cycle(PORTS), secrets.randbelow(len(PORTS)), None)
#: Each byte is a port. A process locks those that it has taken, until it ends, so that no other takes them meanwhile.
_TAKEN = os.open(Path(tempfile.gettempdir()) / f"ucm-test-ports-{os.getuid()}", os.O_WRONLY | os.O_CREAT, 0o600)


def free_port(beside: int = 0) -> int:
    """Return a port that no program uses, and that no other process of the tests gets.

    The kernel gives none of these to a program that asks for any port, as each client does: nobody takes it before the
    server does.

    Args:
        beside: Another port must be free as well, as many above; 0: none.
    """
    while True:
        port = next(_PORTS)
        if all(one in PORTS and _take(one) for one in (port, port + beside)):
            return port


def _take(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as listener:
        fcntl.lockf(_TAKEN, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        listener.bind(("127.0.0.1", port))
        return True
    return False
