"""The costs of an engine's start: identifying the weights, the connector as a whole, and the workers' answers."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.figure import Figure, alternate
from tests.e2e.bench.model_files import write_llama
from tests.e2e.environment import with_overlay
from tests.e2e.model import CONFIG
from tests.e2e.prefix_engine import PrefixEngine, connector, posix
from tests.e2e.processes import IN_PROCESS
from transforms.place import BUILD
from ucm.hashing.file_contents import FileContents

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A Llama of 1.04 GB in one file, the worst case: a file is read by one thread.
LARGE: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 15,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
PAIRS = 3
READS = 5
HANDSHAKES = 3
#: How much longer than without the connector an engine may take to start.
MOST_LONGER = 1.02
_METHOD = {"SinkWindow": {"sink_tokens": 32, "window_tokens": 64}}
_IDENTIFIED = re.compile(r"the weights were identified after ([\d.]+) s")
_ANSWERED = re.compile(r"\(asked in ([\d.]+) ms\)")


def figures(release: str) -> Iterator[Figure]:
    """Yield the figures of a model of a gigabyte, whose file is in the page cache, and of the handshake."""
    environment = with_overlay(release)
    model = BUILD / "bench" / "weights-model"
    write_llama(environment.python, model, LARGE)
    file = model / "model.safetensors"
    gigabytes = file.stat().st_size / 1e9
    reads = [_read(file) for _ in range(READS + 1)][1:]
    spent = [one[1] / gigabytes for one in reads]
    detail: dict[str, Any] = {"gigabytes": gigabytes, "seconds": [one[0] for one in reads], "cpu_s_per_gb": spent}
    # Processor time: other processes come first, so the duration says more about them.
    yield Figure("weights: CPU time to hash a file in the page cache", statistics.median(spent), "s/GB", None, detail)
    with TemporaryDirectory(prefix="ucm-bench-") as temporary:
        directory = Path(temporary)
        identified: list[float] = []

        def start(*, connected: bool) -> float:
            place = directory / f"start-{len(list(directory.iterdir()))}"
            store = connector(posix(directory / "store"), "UCMConnector") if connected else {}
            # An empty cache of digests, so that the weights are read.
            switches = {**IN_PROCESS, "XDG_CACHE_HOME": str(place / "cache")}
            wanted = {"model": str(model), "dtype": "bfloat16", **store}
            with PrefixEngine(environment, place, wanted, switches, forked=False) as engine:
                took = engine.wait_until_started()
                if connected:
                    while not (found := _IDENTIFIED.search(engine.log)):
                        time.sleep(0.1)
                    identified.append(float(found[1]))
            return took

        sides = [lambda connected=connected: start(connected=connected) for connected in (False, True)]
        alternate(sides, 1)
        identified.clear()
        without, with_ = alternate(sides, PAIRS)
        medians = [statistics.median(side) for side in (without, with_)]
        detail = {
            "pairs": PAIRS,
            "without_s": without,
            "with_s": with_,
            "more_s": medians[1] - medians[0],
            "identified_after_s": identified,
        }
        name = f"weights: engine start with UCMConnector, {gigabytes:.2f} GB, to one without"
        yield Figure(name, medians[1] / medians[0], "", MOST_LONGER, detail)
        for workers, where in ((1, "a worker in another process"), (2, "two workers in processes of their own")):
            answers = []
            for number in range(HANDSHAKES):
                place = directory / f"handshake-{workers}-{number}"
                method = {"additional_config": {"ucm_sparse_config": _METHOD}, "enable_prefix_caching": False}
                ranks = {"tensor_parallel_size": workers, "distributed_executor_backend": "mp"} if workers > 1 else {}
                with PrefixEngine(environment, place, {**method, **ranks}, forked=False) as engine:
                    engine.wait_until_started()
                    answers.append(_handshake(engine.log))
            yield Figure(f"handshake with {where}", statistics.median(answers), "ms", None, {"answers_ms": answers})


def _read(file: Path) -> tuple[float, float]:
    """Return the duration and the processor time of hashing a file, in seconds."""
    begun, contents = time.process_time(), FileContents(float("inf"))
    return contents.read(contents.look_up([file])).seconds, time.process_time() - begun


def _handshake(log: str) -> float:
    found = _ANSWERED.search(log)
    if found is None:
        raise RuntimeError(f"the engine does not say how long its workers took to answer:\n{log[-3000:]}")
    return float(found[1])
