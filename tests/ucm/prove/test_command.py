"""`ucm prove` in real processes, with an engine that stands in for vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import ucm

ROOT = Path(ucm.__file__).parents[1]
FAKE = Path(__file__).with_name("fake_vllm.txt")
METRICS = """
from types import SimpleNamespace
from vllm import COUNTS

class REGISTRY:
    @staticmethod
    def collect():
        return [SimpleNamespace(samples=[SimpleNamespace(name=name, value=value) for name, value in COUNTS.items()])]
"""


@dataclass(frozen=True)
class Place:
    """A directory with packages, a model, a store and temporary files."""

    root: Path

    @property
    def command(self) -> list[str]:
        config = ["--config", str(self.root / "ucm_config.yaml")]
        return [sys.executable, "-m", "ucm", "prove", "--model", str(self.root / "model"), *config]

    def variables(self, fault: str) -> dict[str, str]:
        path = os.pathsep.join([str(self.root / "packages"), str(ROOT)])
        return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.root / "tmp"), "FAKE_ENGINE": fault}

    def prove(self, *options: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        command = [*self.command, *options]
        return subprocess.run(command, env=self.variables(fault), capture_output=True, text=True, check=False)

    def processes(self) -> list[str]:
        """The processes that were started with these temporary files."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if f"TMPDIR={self.root}".encode() in file.read_bytes():
                    found.append(file.parent.name)
        return found

    def is_clean(self) -> bool:
        return not list((self.root / "tmp").iterdir()) and not list((self.root / "store").iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for name in ("model", "tmp", "store", "packages/vllm", "packages/torch"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    shutil.copyfile(FAKE, tmp_path / "packages" / "vllm" / "__init__.py")
    (tmp_path / "packages" / "torch" / "__init__.py").write_text('__version__ = "2"\n')
    (tmp_path / "packages" / "prometheus_client.py").write_text(METRICS)
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 1024}')
    (tmp_path / "ucm_config.yaml").write_text(f"store: {{directories: {tmp_path / 'store'}}}\n")
    return Place(tmp_path)


def test_the_answers_are_the_same(place: Place) -> None:
    done = place.prove("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert [row["verdict"] for row in data["rows"]] == ["same"] * 6
    assert all(row["preemptions"] > 0 for row in data["rows"] if row["name"].startswith("16"))
    assert all(row["loaded_bytes"] > 0 for row in data["rows"] if "after" in row["name"])
    assert data["prompts"]["source"] == "token ids"
    assert "ucm: an engine without UCM" in done.stderr
    assert place.is_clean()


def test_a_wrong_token_after_a_load_is_an_error(place: Place) -> None:
    done = place.prove(fault="token")
    assert done.returncode == 1, done.stdout + done.stderr
    table = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    verdicts = {cells[0]: cells[1] for cells in table if len(cells) > 1}
    assert verdicts["one at a time, cold"] == "same"
    assert verdicts["one at a time, after a reset"] == verdicts["16 at a time, after a restart"] == "DIFFERS"
    assert place.is_clean()


def test_an_engine_without_memory(place: Place) -> None:
    done = place.prove(fault="memory")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the engine without UCM: out of memory: RuntimeError: CUDA out of memory" in done.stdout
    assert "  - plain | RuntimeError: CUDA out of memory" in done.stdout
    assert "Traceback" not in done.stderr
    assert place.is_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_proof_leaves_nothing(place: Place, number: int) -> None:
    started = subprocess.Popen(place.command, env=place.variables("hang"), stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    assert started.stderr.readline().startswith("ucm: an engine without UCM")
    started.send_signal(number)
    _, told = started.communicate()
    assert started.returncode == 130
    assert told == "ucm: interrupted; the engines are ended, and their store is deleted\n"
    assert place.is_clean()
    assert not place.processes()


def test_an_environment_without_vllm(place: Place) -> None:
    shutil.rmtree(place.root / "packages" / "vllm")
    done = place.prove()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ucm: vLLM is not installed here\n  to do: ")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--minutes", "0"), "argument --minutes: must be more than 0"),
        (("--tokens", "20"), "argument --tokens: must be a whole number of at least 128"),
        (("--engine-args", "[1]"), "argument --engine-args: write a JSON object"),
        (("--sparse", "BlockTopk"), "argument --sparse: did you mean 'BlockTopK'?"),
        (("--engine-args", '{"model": "x"}'), "`ucm prove` sets model itself"),
    ],
)
def test_wrong_usage(place: Place, options: tuple[str, ...], what: str) -> None:
    done = place.prove(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert place.is_clean()
