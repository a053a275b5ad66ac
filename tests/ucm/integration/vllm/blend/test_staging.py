"""Chunks whose request ends while they are being staged."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.blend.scene import Request, Scene, tokens
from ucm.integration.vllm.blend.staging import ChunkLookup, ChunkStager

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.store.base import BlockKey


class _Abandoned(ChunkLookup):
    """Its request ends right when a thread has seen that it had not."""

    def __init__(self, stager: ChunkStager, pieces: list[list[BlockKey]]) -> None:
        super().__init__(pieces, time.monotonic() + 60, [None for _ in pieces])
        self.ending: list[threading.Thread] = []
        self.stager = stager

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name == "finished" and not found and not self.ending:
            self.ending.append(threading.Thread(target=self.stager.release, args=(self,)))
            self.ending[0].start()
            self.ending[0].join(0.2)
        return found


def test_a_request_that_ends_between_two_chunks_ends_no_thread(tmp_path: Path) -> None:
    """An error in what a thread runs ends the thread, and with the last of them each request waits its whole time."""
    with Scene(tmp_path) as scene:
        scene.answer()
        scene.idle()
        keys = scene.put(tokens(1, 70))
        assert scene.matched(Request("begins", tokens(2, 70), [[0, 70]])) == 0
        lookup = _Abandoned(scene.stager, [keys])
        scene.stager._run(lookup)
        lookup.ending[0].join()
        assert lookup.finished
        assert lookup.rows == []
