"""The ports of the servers that other tests start."""

from __future__ import annotations

from tests.ports import PORTS, free_port
from tests.ucm.store.servers import free_cluster_port


def test_no_port_is_given_twice() -> None:
    """A server's other ports, and those of the next server, are chosen before it listens on the first."""
    given = [free_port() for _ in range(500)]
    assert len(set(given)) == len(given)
    assert set(given) <= set(PORTS)


def test_both_ports_of_a_node_are_among_them() -> None:
    assert {port + 10_000 for port in (free_cluster_port() for _ in range(20))} <= set(PORTS)
