"""`ucm try` and `ucm store lookup` use the same namespace as a real engine, and find what the engine has stored."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.workload import BLOCK, ENGINE
from tests.ucm.debugging_page import steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_runs import PrefixRuns

pytestmark = pytest.mark.e2e


def ucm(environment: Environment, directory: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of `ucm` in an environment."""
    from tests.e2e.engine import variables  # noqa: PLC0415 - needs the build's packages

    return subprocess.run(
        [environment.python, "-m", "ucm", *command],
        env=variables(directory, {"PYTHONPATH": ""}),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_finds_what_an_engine_stored(prefix_runs: PrefixRuns, tmp_path: Path) -> None:
    from tests.e2e.engine import MODEL  # noqa: PLC0415 - needs the build's packages

    record = prefix_runs["cold direct"]
    (namespace,) = set(re.findall(r"\[UCM\.Connector\] namespace (\S+),", record.log))
    prompt = record.phases["document"].requests[0]["prompt"]
    config, tokens = tmp_path / "ucm_config.yaml", tmp_path / "tokens.json"
    config.write_text(f"store: {{directories: {record.store}}}\n", encoding="utf-8")
    tokens.write_text(json.dumps(prompt), encoding="utf-8")
    arguments = {name: ENGINE[name] for name in ("block_size", "dtype", "max_model_len", "seed")}
    asked = ("--config", config, "--model", MODEL, "--engine-args", json.dumps(arguments))
    done = ucm(record.environment, tmp_path, "try", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"namespace    {namespace}\n" in done.stdout
    assert "8 blocks, 524,288 bytes: intact, saved in " in done.stdout
    assert not list(record.store.glob("ucm-try*"))
    looked = ucm(record.environment, tmp_path, "store", "lookup", "--json", "--tokens", tokens, *asked)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    data = json.loads(looked.stdout)
    # The last block is computed even if full, because at least one token must be.
    count = len(prompt)
    assert (data["tokens"], data["found_tokens"]) == (count, count - BLOCK)
    assert [block["tiers"] for block in data["groups"][0]["blocks"]] == [["Posix"]] * (count // BLOCK)


@pytest.mark.newest_only
def test_vllms_refusal_is_one_error(prefix_runs: PrefixRuns, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    (tmp_path / "ucm_config.yaml").write_text("store: {directories: store}\n", encoding="utf-8")
    files = ("--config", "ucm_config.yaml", "--model", "model")
    done = ucm(prefix_runs.environments[False], tmp_path, "try", *files)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ucm: vLLM would not start with this model" in done.stderr
    assert "NoSuchModel" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.newest_only
def test_an_engine_prints_the_lines_of_the_page(prefix_runs: PrefixRuns, tmp_path: Path) -> None:
    """With other numbers and names: one engine computes and saves a prompt, and another loads it."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - likewise
    from tests.e2e.prefix_runs import wait_for_blocks  # noqa: PLC0415 - likewise
    from tests.e2e.prefix_workload import prompt, request  # noqa: PLC0415 - likewise
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - needs the build's packages

    config = tmp_path / "ucm_config.yaml"
    store = posix(tmp_path / "store")
    config.write_text(json.dumps({"store": store}), encoding="utf-8")
    arguments = connector(store, "UCMConnector")
    arguments["kv_transfer_config"]["kv_connector_extra_config"] = {"UCM_CONFIG_FILE": str(config)}
    arguments["additional_config"] = {"ucm_sparse_config": {"BlockTopK": {"token_budget": 4096}}}
    switches = {**IN_PROCESS, "UNIFIED_CACHE_LOG_LEVEL": "DEBUG", "UCM_PATCH_VERBOSE": "1", "PYTHONHASHSEED": "0"}
    log = ""
    for name in ("first", "second"):
        with PrefixEngine(prefix_runs.environments[True], tmp_path / name, arguments, switches) as engine:
            engine.generate([request(prompt(4 * BLOCK + 3, "debugging"))])
            wait_for_blocks(tmp_path / "store", 4)
        log += engine.log
    missing = [row.line for row in steps() if row.line and not re.search(shape(row.line), log)]
    assert missing == []


def shape(line: str) -> str:
    """Return a line with its numbers and names replaced by placeholders."""
    words = re.split(r"([0-9a-f]{16}|\d+|/\S+|llama-\w+)", line)
    return "".join(re.escape(word) if place % 2 == 0 else r".+?" for place, word in enumerate(words))
