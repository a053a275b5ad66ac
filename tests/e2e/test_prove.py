"""`ucm prove` with real engines: it finds no difference where there is none, and a store that returns wrong values."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.processes import IN_PROCESS, INSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.environment import Environment
    from tests.e2e.scenarios import Environments

pytestmark = pytest.mark.e2e


def prove(
    environment: Environment,
    directory: Path,
    *options: str,
    dtype: str = "float32",
    switches: Mapping[str, str] = IN_PROCESS,
) -> tuple[int, dict[str, Any]]:
    """Run the command with the tiny model; return its exit code and JSON."""
    from tests.e2e.engine import MODEL, variables  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.model import write_model  # noqa: PLC0415 - likewise

    engine = {"enforce_eager": True, "block_size": 32, "dtype": dtype}
    arguments = ("--minutes", "10", "--tokens", "512", "--engine-args", json.dumps(engine), "--json", *options)
    # vLLM's sockets are files in it. A socket's path has at most 107 bytes, and pytest's own directory may be longer.
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [environment.python, "-m", "ucm", "prove", "--model", write_model(MODEL), *arguments],
            env={**variables(directory, switches), "TMPDIR": temporary, "PYTHONPATH": os.fspath(INSIDE)},
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        assert not list(Path(temporary).glob("ucm-prove-*"))
    data: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, data


def test_answers_are_the_same(environments: Environments, tmp_path: Path) -> None:
    """With the runtime alone, without an overlay, in engines of several processes."""
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    config = tmp_path / "ucm_config.yaml"
    memory = Path(f"/dev/shm/ucm-e2e-prove-{os.getpid()}")  # noqa: S108 - the tier is in shared memory
    config.write_text(f"store: {{pipeline: Dram|Posix, directories: {store}, dram_directory: {memory}}}\n")
    code, data = prove(environments.runtime, tmp_path, "--config", str(config), switches={})
    assert code == 0, json.dumps(data, indent=1)
    rows = {row["name"]: row for row in data["rows"]}
    assert {row["verdict"] for row in rows.values()} == {"same"}
    assert len(rows) == 6
    for name, row in rows.items():
        crowd = name.startswith("16")
        # vLLM 0.27.1 drops the counts of steps without an output. One request at a time finds none in its own cache.
        loaded = row["loaded_bytes"] if crowd else row["loaded_bytes"] + row["cached_tokens"]
        # In a crowd, a preempted request may load what it has saved.
        assert (loaded > 0) == ("after" in name) or (crowd and loaded), row
        assert row["aborted"] == (4 if crowd else 0), row
        # Requests whose loads end late do not run together, so that none is preempted; then a note says so.
        noted = any(note.startswith(f"{name}: vLLM counted no preemption") for note in data["notes"])
        assert (row["preemptions"] > 0) == (crowd and not noted), row
    assert sum(row["preemptions"] for row in rows.values()) > 0
    assert data["runs"]["plain"]["runner"].startswith("model runner V1")
    assert data["prompts"]["source"] == "token ids"
    assert not list(store.iterdir())
    assert not list(memory.parent.glob(f"{memory.name}*"))


@pytest.mark.newest_only
def test_wrong_values_are_found(environments: Environments, tmp_path: Path) -> None:
    """Their checksums are right, so only the answers tell."""
    config = tmp_path / "ucm_config.yaml"
    options = f"{{directory: {tmp_path / 'lies'}}}"
    (tmp_path / "lies").mkdir(mode=0o700)
    config.write_text(f'store: {{pipeline: "lying_store:LyingStore", options: {options}}}\n')
    code, data = prove(environments.runtime, tmp_path, "--config", str(config), dtype="auto")
    assert code == 1, json.dumps(data, indent=1)
    verdicts = {row["name"]: row["verdict"] for row in data["rows"]}
    assert verdicts["one at a time, cold"] == "same"
    assert verdicts["one at a time, after a reset"] == verdicts["one at a time, after a restart"] == "DIFFERS"
    assert verdicts["16 at a time, after a reset"] == "DIFFERS"


@pytest.mark.newest_only
def test_a_sparse_method_with_a_full_budget(environments: Environments, tmp_path: Path) -> None:
    code, data = prove(environments.overlay, tmp_path, "--sparse", "BlockTopK")
    assert code == 0, json.dumps(data, indent=1)
    verdicts = {row["name"]: row["verdict"] for row in data["rows"]}
    assert verdicts["one at a time, sparse, full budget"] == verdicts["16 at a time, sparse, full budget"] == "same"


@pytest.mark.newest_only
def test_a_method_that_does_not_run_without_the_overlay_is_not_judged(
    environments: Environments, tmp_path: Path
) -> None:
    code, data = prove(environments.runtime, tmp_path, "--sparse", "BlockTopK")
    assert code == 3, json.dumps(data, indent=1)
    reason = data["rows"][-1]["reason"]
    assert reason.startswith("the sparse method did not run: install the overlay"), reason
    assert {row["verdict"] for row in data["rows"][:6]} == {"same"}
