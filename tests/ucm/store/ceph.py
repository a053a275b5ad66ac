"""A CephFS in user space: a monitor, an OSD that keeps its data in memory, an MDS, and mounts by FUSE.

Each mount is a client of its own, with its own cache and locks, as on a host of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

from tests.ports import free_port
from tests.ucm.store.servers import stop

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse", "monmaptool")
_PACKAGES = "ceph-mon ceph-osd ceph-mds ceph-fuse"
_PATIENCE = 120.0
#: Nothing is authenticated, one copy is enough, and no daemon waits for others.
_OPTIONS = """
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_objectstore = memstore
memstore_device_bytes = 1073741824
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
ms_bind_ipv6 = false
"""


def lacking() -> str:
    """Return why a CephFS cannot run here; empty if it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not in PATH: `apt-get install --no-install-recommends {_PACKAGES}` installs them"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid():
        return "mounting by FUSE needs /dev/fuse and root"
    return ""


class Ceph:
    """A running CephFS; a context manager.

    Args:
        directory: An empty directory for its data and logs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._configuration = directory / "ceph.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._mounts: list[Path] = []
        self._port = free_port()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def mount(self, name: str) -> Path:
        """Mount the file system in a new directory of this name, by a client of its own."""
        where = self._directory / name
        where.mkdir()
        self._spawn(name, "ceph-fuse", "-f", "-n", "client.admin", str(where))
        self._mounts.append(where)
        self._until(lambda: os.path.ismount(where), name)
        return where

    def freeze(self, name: str) -> None:
        """Stop ``mon``, ``osd`` or ``mds``, or the client of a mount."""
        stop(self._processes[name])

    def thaw(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End all processes, the clients first: a mount whose client has ended fails at once instead of waiting."""
        for name in reversed(self._processes):
            process = self._processes[name]
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for where in self._mounts:
            command = ["umount", "--lazy", str(where)]
            subprocess.run(command, check=False, capture_output=True, timeout=_PATIENCE)
        self._processes.clear()
        self._mounts.clear()

    def _start(self) -> None:
        here, identity = self._directory, str(uuid.uuid4())
        address = f"v2:127.0.0.1:{self._port}"
        places = "".join(f"{name}_data = {here}/{name}\n" for name in ("mon", "osd", "mds"))
        logs = f"log_file = {here}/$name.log\nadmin_socket = {here}/$name-$pid.asok\nrun_dir = {here}\n"
        head = f"[global]\nfsid = {identity}\nmon_host = {address}\n"
        self._configuration.write_text(f"{head}{_OPTIONS}{places}{logs}", encoding="utf-8")
        for name in ("mon", "osd", "mds"):
            (here / name).mkdir()
        monitors = f"{here}/monmap"
        self._run("monmaptool", "--create", "--fsid", identity, "--addv", "a", f"[{address}]", monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        self._spawn("mon", "ceph-mon", "-f", "-i", "a")
        self._until(lambda: self._run("ceph", "--connect-timeout", "5", "status", check=False), "mon")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        self._spawn("osd", "ceph-osd", "-f", "-i", "0")
        for pool in ("metadata", "data"):
            self._run("ceph", "osd", "pool", "create", pool, "4")
        self._run("ceph", "fs", "new", "kv", "metadata", "data")
        self._spawn("mds", "ceph-mds", "-f", "-i", "a")
        self._until(lambda: ":active" in self._run("ceph", "mds", "stat"), "mds")

    def _spawn(self, name: str, *command: str) -> None:
        with (self._directory / f"{name}.out").open("wb") as output:
            self._processes[name] = subprocess.Popen(
                [*command, "-c", str(self._configuration)], stdout=output, stderr=output
            )

    def _run(self, *command: str, check: bool = True) -> str:
        """Run a program to its end; return what it printed, empty if it failed."""
        known = [] if command[0] == "monmaptool" else ["-c", str(self._configuration)]
        done = subprocess.run([*command, *known], capture_output=True, text=True, check=False, timeout=_PATIENCE)
        if done.returncode and check:
            raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
        return "" if done.returncode else done.stdout

    def _until(self, condition: Callable[[], object], name: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                output = (self._directory / f"{name}.out").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"{name} of Ceph does not run: {output[-2000:]}")
            time.sleep(0.1)
