"""Ports for the servers that tests and the demo start; it needs only the standard library."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket

#: Below those that Linux gives to a program that asks for any port.
PORTS = range(10_000, 32_768)
_PORTS = itertools.islice(itertools.cycle(PORTS), secrets.randbelow(len(PORTS)), None)


def free_port() -> int:
    """Return a port that no program uses.

    The kernel gives none of these to a program that asks for any port, as each client does: nobody takes it before the
    server does. Each process starts at another one, because several run at a time.
    """
    while True:
        port = next(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
