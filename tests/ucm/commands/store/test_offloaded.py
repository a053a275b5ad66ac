"""What an engine with ``ESA`` leaves behind if it is killed: ``stat`` and the doctor show it, ``gc`` deletes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.sparse.esa.memory import shared_memory
from ucm.sparse.esa import method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.ucm.commands.store.conftest import Answer

#: A worker's store of its own with blocks in memory; it says when they are there, and waits to be killed. Its blocks
#: are numpy's instead of torch's, which is not installed everywhere.
WORKER = """
import sys, threading, time
from types import SimpleNamespace

import numpy as np

from ucm.store.base import BlockGeometry
from ucm.sparse.esa.offload_store import OffloadStore
from ucm.store.config import StoreConfig
from ucm.store.posix.layout import owner_name

class Rows(np.ndarray):
    def numpy(self):
        return self.view(np.ndarray)

copies = SimpleNamespace(geometry=BlockGeometry((4096, 8192), bytes(16)))
store = OffloadStore(StoreConfig(pipeline="Dram", dram_directory=sys.argv[1]), copies, owner_name(), 0)
store.save(1, 0, [np.ones((4, size), np.uint8).view(Rows) for size in (4096, 8192)])
while store._saving or store._kept[1].copies:  # until they are not in host memory only
    store.settle()
    time.sleep(0.01)
print("saved", flush=True)
threading.Event().wait()
"""


def worker(root: Path) -> subprocess.Popen[str]:
    found = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root)], cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "saved\n"
    return found


def files_of(root: Path, process: subprocess.Popen[str]) -> list[Path]:
    return [path for path in root.glob(f"offloaded+*-{process.pid}-*/**/*") if path.is_file()]


@pytest.fixture
def root() -> Iterator[Path]:
    with shared_memory() as found:
        yield found


@pytest.mark.parametrize("default", [True, False])
def test_a_killed_worker_leaves_nothing_that_gc_does_not_find(
    default: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Answer]
) -> None:
    file = tmp_path / "ucm_config.yaml"
    given = "{}"
    if default:
        monkeypatch.setattr(method, "default_offload_directory", lambda: str(root))
    else:
        given = f"{{store: {{pipeline: Dram, dram_directory: '{root}'}}}}"
    file.write_text(f"store: {{pipeline: Empty}}\nucm_sparse_config: {{ESA: {given}}}\n", encoding="utf-8")
    alive, killed = worker(root), worker(root)
    try:
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        of_alive, left = (files_of(root, process) for process in (alive, killed))
        assert left
        assert of_alive

        stocks = ask("stat", "--json", "--config", file).data["directories"]
        (stock,) = [of for of in stocks if of["directory"] == str(root)]
        assert sorted(of["left_behind"] for of in stock["namespaces"]) == [0, len(left)]
        answer = ask("gc", "--dry-run", "--json", "--config", file)
        assert [(of["kind"], of["count"]) for of in answer.data["deleted"]] == [("left behind", len(left))]
        assert files_of(root, killed) == left

        assert ask("gc", "--yes", "--older-than", "0s", "--config", file).code == 0
        assert [of.name for of in root.glob("offloaded+*")] == [of_alive[0].relative_to(root).parts[0]]
        assert files_of(root, alive) == of_alive
    finally:
        for process in (alive, killed):
            process.kill()
            process.communicate()
    assert ask("gc", "--yes", "--config", file).code == 0
    assert not list(root.glob("offloaded+*"))
