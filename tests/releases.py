"""The supported releases: each has a reviewed overlay, and the tests cover all of them."""

from __future__ import annotations

#: The releases of vLLM Ascend; the last one is a release candidate, the newest on the index.
ASCEND: tuple[str, ...] = ("0.9.1", "0.11.0", "0.13.0", "0.18.0", "0.23.0", "0.23.0.post1", "0.30.0rc2")

REVIEWED: tuple[str, ...] = (
    "0.9.0",
    "0.9.1",
    "0.9.2",
    "0.10.0",
    "0.10.1.1",
    "0.10.2",
    "0.11.0",
    "0.11.1",
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.14.1",
    "0.16.0",
    "0.17.1",
    "0.18.0",
    "0.18.1",
    "0.19.1",
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
