"""A router steers a store over HTTP, between two real engines: what it prefetches is found in memory."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.test_prefix_cache_tiers import memory  # noqa: F401 - a fixture
from tests.e2e.workload import BLOCK, ENGINE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.prefix_runs import PrefixRuns

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

BLOCKS = 6


def test_a_router_prefetches_and_drops(
    prefix_runs: PrefixRuns,
    tmp_path: Path,
    memory: Path,  # noqa: F811 - the fixture
) -> None:
    import httpx2  # noqa: PLC0415 - needs the build's packages

    from tests.e2e.engine import MODEL, variables  # noqa: PLC0415 - likewise
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - likewise
    from tests.e2e.prefix_runs import wait_for_blocks  # noqa: PLC0415 - likewise
    from tests.e2e.prefix_workload import prompt, request  # noqa: PLC0415 - likewise
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - likewise

    environment = prefix_runs.environments[False]
    store = {**posix(tmp_path / "store"), "pipeline": "Dram|Posix", "dram_directory": str(memory / "store")}
    config, path = tmp_path / "ucm_config.yaml", tmp_path / "store.sock"
    config.write_text(json.dumps({"store": store}), encoding="utf-8")
    asked = request(prompt(BLOCKS * BLOCK + 1, "steering"))
    with PrefixEngine(environment, tmp_path / "first", connector(store), IN_PROCESS) as engine:
        (plain,) = engine.generate([asked])
        wait_for_blocks(tmp_path / "store", BLOCKS)
    shutil.rmtree(memory / "store")  # as if the host had been restarted
    arguments = {name: ENGINE[name] for name in ("block_size", "dtype", "max_model_len", "seed")}
    command: list[str | Path] = ["store", "serve", "--config", config, "--model", MODEL, "--listen", f"unix:{path}"]
    server = subprocess.Popen(
        [environment.python, "-m", "ucm", *command, "--engine-args", json.dumps(arguments)],
        env=variables(tmp_path, {"PYTHONPATH": ""}),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == f"listening on unix:{path}\n"
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=60.0) as client:

            def post(action: str) -> Any:
                answer = client.post(f"http://ucm/v1/{action}", json={"tokens": asked["prompt"]})
                assert answer.status_code == 200, answer.text
                return answer.json()

            found = {"tokens": BLOCKS * BLOCK, "blocks": BLOCKS, "there": BLOCKS, "copied": BLOCKS, "failed": {}}
            assert post("prefetch") == {"tier": "Dram", **found}
            alone = {"pipeline": "Dram", "dram_directory": store["dram_directory"]}
            with PrefixEngine(environment, tmp_path / "second", connector(alone), IN_PROCESS) as engine:
                (loaded,) = engine.generate([asked])
                assert (loaded.tokens, loaded.cached) == (plain.tokens, BLOCKS * BLOCK)
                assert post("demote")["deleted"] == BLOCKS
                assert [block["tiers"] for block in post("lookup")["groups"][0]["blocks"]] == [["Posix"]] * BLOCKS
                assert engine.reset()
                (staged,) = engine.generate([asked])
                assert (staged.tokens, staged.cached) == (plain.tokens, BLOCKS * BLOCK), "as the page says"
            assert post("drop")["dropped"]["Posix"] == BLOCKS
            assert post("lookup")["found_tokens"] == 0
        server.terminate()
        assert server.wait(30.0) in {0, -15}
    finally:
        server.kill()
        server.communicate()
