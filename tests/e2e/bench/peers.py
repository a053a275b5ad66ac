"""The sides of the comparison: no connector, ours, vLLM's own connectors, LMCache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.peers_install import lmcache_python, runtime_python
from tests.e2e.environment import plain
from tests.e2e.processes import INSIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

NO_CONNECTOR = "no connector"
OURS = "ours, direct, Posix"
OURS_CHUNKS = "ours, direct, Posix, chunks of 256"
OURS_CACHE = "ours, direct, Cache|Posix"
OURS_LAYERWISE = "ours, layer-wise, Posix"
EXAMPLE = "ExampleConnector"
OFFLOADING_DRAM = "OffloadingConnector, DRAM"
OFFLOADING_FS = "OffloadingConnector, fs tier"
LMCACHE_FS = "LMCache 0.5.6, fs"
LMCACHE_SHM = "LMCache 0.5.6, fs_native, shm"

#: The sides measured together; more engines at once would not fit into memory. The reference side and ours
#: are in each group.
GROUPS: tuple[tuple[str, ...], ...] = (
    (NO_CONNECTOR, OURS, EXAMPLE, OFFLOADING_FS),
    (NO_CONNECTOR, OURS, LMCACHE_FS, LMCACHE_SHM),
    (NO_CONNECTOR, OURS, OURS_CACHE, OURS_LAYERWISE, OFFLOADING_DRAM),
)


@dataclass(frozen=True)
class Place:
    """The storage of one side.

    Attributes:
        disk: A directory on a disk.
        memory: A directory in shared memory.
        name: A unique name for named resources.
        port: The first of three free ports.
        kv_bytes: All the KV that will be stored.

    Raises:
        ValueError: What is deleted at the end is not this side's own: a path that is not absolute, or no name.
    """

    disk: Path
    memory: Path
    name: str
    port: int
    kv_bytes: int

    def __post_init__(self) -> None:
        if not (self.disk.is_absolute() and self.memory.is_absolute() and self.name):
            raise ValueError(f"whatever {self} names is deleted at the end: it needs absolute paths and a name")


@dataclass(frozen=True)
class Setup:
    """One side.

    Attributes:
        name: Its name in the tables.
        python: The interpreter with its vLLM.
        transfer: vLLM's ``kv_transfer_config``; None without a connector.
        variables: Environment variables besides the common ones.
        server: The command of a server that it needs.
        on_disk: Whether its data survive a restart of everything, so that the page cache matters.
        in_memory: Whether it has memory that survives the engine.
    """

    name: str
    python: Path
    transfer: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    server: Sequence[str] | None = None
    on_disk: bool = True
    in_memory: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is ours."""
        return self.name.startswith("ours")


def make_setup(name: str, release: str, place: Place) -> Setup:
    """One side of the comparison, installed if it was not."""
    return _MAKERS[name](release, place)


def _connector(name: str, extra: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra), **more}


def _none(release: str, _place: Place) -> Setup:
    return Setup(NO_CONNECTOR, plain(release).python, on_disk=False)


def _ours(name: str, connector: str, pipeline: str, **extra: int) -> Callable[[str, Place], Setup]:
    def make(release: str, place: Place) -> Setup:
        store: dict[str, Any] = {"pipeline": pipeline, "directories": [str(place.disk)]}
        in_memory = pipeline != "Posix"
        if in_memory:
            store["dram_directory"] = str(place.memory)
        transfer = _connector(
            connector, {"store": store, **extra}, kv_connector_module_path="ucm.integration.vllm.ucm_connector"
        )
        return Setup(name, runtime_python(release), transfer, in_memory=in_memory)

    return make


def _example(release: str, place: Place) -> Setup:
    return Setup(EXAMPLE, plain(release).python, _connector(EXAMPLE, {"shared_storage_path": str(place.disk)}))


def _offloading(release: str, place: Place, name: str, spec: str, **extra: Any) -> Setup:
    # Reserved and touched whole at the start; the rest is what its fs tier may still hold while it writes.
    memory = place.kv_bytes * 5 // 4
    settings = {"spec_name": spec, "spec_module_path": "ttft_offloading", "cpu_bytes_to_use": memory, **extra}
    return Setup(
        name,
        plain(release).python,
        _connector("OffloadingConnector", settings, engine_id=place.name),
        {"PYTHONPATH": str(INSIDE)},
        on_disk=bool(extra),
    )


def _offloading_dram(release: str, place: Place) -> Setup:
    return _offloading(release, place, OFFLOADING_DRAM, "CpuDramSpec")


def _offloading_fs(release: str, place: Place) -> Setup:
    tier = {"type": "fs", "root_dir": str(place.disk)}
    return _offloading(release, place, OFFLOADING_FS, "CpuTieringSpec", secondary_tiers=[tier])


def _lmcache(name: str, adapter: str, *, shared_memory: bool) -> Callable[[str, Place], Setup]:
    def make(release: str, place: Place) -> Setup:
        python = lmcache_python(release)
        command = [str(python.parent / "lmcache"), "server", "--port", str(place.port)]
        command += ["--http-port", str(place.port + 1), "--prometheus-port", str(place.port + 2)]
        # It evicts from 80 % on.
        command += ["--l1-size-gb", f"{1.5 * place.kv_bytes / 2**30:.2f}", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "engine_driven"]
        command += ["--l2-adapter", json.dumps({"type": adapter, "base_path": str(place.disk)})]
        if shared_memory:
            command += ["--no-l1-use-lazy", "--shm-name", place.name]
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": place.port}
        transfer = _connector("LMCacheMPConnector", {**extra, "lmcache.mp.mp_transfer_mode": "engine_driven"})
        variables = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        return Setup(name, python, transfer, variables, command, in_memory=True)

    return make


#: In the order of tables.
_MAKERS: dict[str, Callable[[str, Place], Setup]] = {
    NO_CONNECTOR: _none,
    OURS: _ours(OURS, "UCMDirectConnector", "Posix"),
    OURS_CHUNKS: _ours(OURS_CHUNKS, "UCMDirectConnector", "Posix", chunk_tokens=256),
    OURS_CACHE: _ours(OURS_CACHE, "UCMDirectConnector", "Cache|Posix"),
    OURS_LAYERWISE: _ours(OURS_LAYERWISE, "UCMLayerWiseConnector", "Posix"),
    EXAMPLE: _example,
    OFFLOADING_DRAM: _offloading_dram,
    OFFLOADING_FS: _offloading_fs,
    LMCACHE_FS: _lmcache(LMCACHE_FS, "fs", shared_memory=False),
    LMCACHE_SHM: _lmcache(LMCACHE_SHM, "fs_native", shared_memory=True),
}
SIDES = tuple(_MAKERS)
