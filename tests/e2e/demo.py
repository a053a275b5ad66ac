"""A demonstration on a real vLLM: `python -m tests.e2e.demo [RELEASE]`.

It generates some text, starts two successive engines on one store, runs `ucm doctor --run`, and shows how to
serve the model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench import ttft_model
from tests.e2e.engine import MODEL, run_engine
from tests.e2e.environment import Environment, with_overlay
from tests.e2e.install_vllm import ENVIRONMENTS, name_vllm
from tests.e2e.prefix_engine import Answer, EngineFailedError, PrefixEngine, connector, posix
from transforms.engine.errors import OverlayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.workload import Request

PARAMS = {"max_tokens": 12, "temperature": 0.0}
#: Prompts of the two engines on one store.
LENGTHS = (512, 1024, 2048)
#: In float32, computed and loaded KV give the same tokens.
LARGER = {**ttft_model.ENGINE, "dtype": "float32", "kv_cache_memory_bytes": None, "max_num_batched_tokens": 2048}
BATCH: list[Request] = [{"prompt": [5, 60, 7], "params": PARAMS}, {"prompt": list(range(3, 200)), "params": PARAMS}]


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, generate and show results; return 0 on success."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.demo", description=__doc__)
    parser.add_argument("release", nargs="?", default="0.32.0")
    release = parser.parse_args(arguments).release
    print(f"1. vLLM {release} for the CPU, our two wheels beside it (the first time takes minutes)", flush=True)
    try:
        environment = demo_environment(release)
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"   {environment.python}\n\n2. a tiny model with random weights generates (about a minute)", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        run = run_engine(
            environment, Path(directory), switches={"UCM_PATCH_VERBOSE": "1"}, batches={"demo": [BATCH]}, forked=False
        )
    if run.code:
        print(run.log[-3000:], file=sys.stderr)
        return 1
    for line in run.log.splitlines():
        if "[UCM.Patch]" in line:
            print("   " + line.partition(",")[2].partition(" ")[2].partition(" is loaded from")[0])
    for request, tokens in zip(BATCH, run.tokens["demo"], strict=True):
        print(f"   {len(request['prompt'])} tokens in, out: {tokens}")
    print("\n3. two engines on one store, the second started when the first had ended (some minutes)", flush=True)
    try:
        well = show_prefix_cache(environment)
    except EngineFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n4. ucm doctor --run", flush=True)
    doctor = subprocess.run([environment.directory / "bin" / "ucm", "doctor", "--run"], check=False).returncode
    print(f"\n5. serve it yourself:\n   {serve_command(environment)}")
    return doctor or int(not well)


def demo_environment(release: str) -> Environment:
    """Return vLLM with both wheels, and with metadata named ``vllm``, which `vllm serve` needs."""
    environment = with_overlay(release, ENVIRONMENTS / f"vllm-{release}-demo")
    name_vllm(environment.site, release)
    return environment


def serve_command(environment: Environment) -> str:
    """Return the command that serves the tiny model of the demo.

    In bfloat16, vLLM 0.32.0's attention uses AMX before a layer of so small a model has asked the operating system for
    it: the worker ends with an illegal instruction.
    """
    return f"{environment.python} -m vllm.entrypoints.cli.main serve {MODEL} --dtype float32"


def show_prefix_cache(environment: Environment) -> bool:
    """Print the time to first token of computed and loaded prompts; return whether the answers were the same."""
    ttft_model.write_model(environment.python)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        engine = {**LARGER, **connector(posix(place / "store"))}
        cold, warm = (generate(environment, place / name, engine) for name in ("first", "second"))
    print("   prompt     first engine   second engine     times   loaded tokens   same answer")
    for length, one, other in zip(LENGTHS, cold, warm, strict=True):
        computed, loaded = one.first_s or 0.0, other.first_s or 0.0
        same = "yes" if one.tokens == other.tokens else "NO"
        print(
            f"   {length:6} {computed:14.3f} s {loaded:13.3f} s {computed / loaded:9.1f} {other.cached:15} {same:>13}"
        )
    return all(one.tokens == other.tokens and other.cached for one, other in zip(cold, warm, strict=True))


def generate(environment: Environment, directory: Path, engine: dict[str, object]) -> list[Answer]:
    """Return a new engine's answers to the prompts, run one after another."""
    threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with PrefixEngine(environment, directory, engine, threads, forked=False) as started:
        started.generate([{"prompt": [5, 60, 7], "params": params}])
        prompts = [ttft_model.prompt(length, "demo") for length in LENGTHS]
        return [started.generate([{"prompt": prompt, "params": params}])[0] for prompt in prompts]


if __name__ == "__main__":
    sys.exit(main())
