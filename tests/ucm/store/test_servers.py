"""The ports of the servers that other tests start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ports import PORTS, free_port
from tests.ucm.store.servers import free_cluster_port

ROOT = Path(__file__).parents[3]


def test_no_port_is_given_twice() -> None:
    """A server's other ports, and those of the next server, are chosen before it listens on the first."""
    given = [free_port() for _ in range(500)]
    assert len(set(given)) == len(given)
    assert set(given) <= set(PORTS)


def test_no_other_process_gets_a_port_that_was_given() -> None:
    """Nothing listens on it yet, and another process may have come to the same place in the list."""
    mine = free_port()
    begin = f"import itertools; from tests import ports; ports._PORTS = itertools.chain([{mine}], ports._PORTS)"
    command = [sys.executable, "-c", f"{begin}; print(ports.free_port())"]
    other = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(other.stdout) != mine


def test_both_ports_of_a_node_are_among_them() -> None:
    assert {port + 10_000 for port in (free_cluster_port() for _ in range(20))} <= set(PORTS)
