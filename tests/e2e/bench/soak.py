"""Sixteen clients of a server whose store holds 40 MiB: answers, and what its processes hold before and after.

`python -m tests.e2e.bench.soak`. The clients send requests over HTTP and abandon a fifth of them. The engine's own
prefix cache is emptied after each round, and the server is restarted in the middle. The longest request has far more KV
than the store holds. A server without a connector gets the same requests; in float32 its answers are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.model_files import write_llama
from tests.e2e.demo import demo_environment
from tests.e2e.engine import variables
from tests.e2e.model import CONFIG, random_weights
from tests.e2e.prefix_engine import connector
from tests.e2e.real.chat import ANSWER, SERVED, Server, serve_command
from tests.ports import free_port
from transforms.place import BUILD
from ucm.store.memory.slab import KEEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.e2e.environment import Environment

DIRECTORY = BUILD / "bench" / "soak"
MODEL = DIRECTORY / "model"
#: Names of the model with an adapter in requests. No request is without one if there are any: vLLM computes such a
#: request with the adapter of another one in the same step on a CPU, and UCM leaves it alone.
ADAPTERS = ("first", "second")
LAYERS, KV_HEADS, HEAD, LONGEST = 4, 4, 64, 32_768
LLAMA: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": LONGEST,
}
BLOCK, RANK = 32, 8
#: In float32: 8 KiB for a token, 256 MiB for the longest request.
TOKEN_BYTES = 2 * 4 * LAYERS * KV_HEADS * HEAD
CAPACITY = 40 << 20
CLIENTS, ROUNDS, REQUESTS = 16, 8, 400
#: Different texts, and their tokens: all together 150 MiB of KV, nearly four times the capacity.
TEXTS, LENGTHS = 40, (96, 992)
TOKENS = 8
#: The share of requests that are abandoned after the first token.
ABANDONED = 0.2
#: Seconds after the last request after which memory that is kept for a while has been given back.
IDLE = 2 * KEEP_SECONDS + 30.0
#: How much shared memory beyond the store's capacity an idle engine may hold; the store itself may be shared memory.
GOAL = 1.0
PIPELINES = ("Posix", "Dram", "Cache|Posix")
_SIZE = re.compile(r"^(Pss|Pss_Anon|Pss_Shmem):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        tokens: Its prompt.
        model: The name of the model.
        abandoned: Whether the client goes away after the first token.
    """

    tokens: tuple[int, ...]
    model: str
    abandoned: bool


@dataclass
class Held:
    """What the processes of a server hold: megabytes, descriptors, threads."""

    memory: float = 0.0
    anonymous: float = 0.0
    shared: float = 0.0
    descriptors: int = 0
    threads: int = 0


@dataclass
class Soaked:
    """What one side did.

    Attributes:
        answers: The text of each request that was not abandoned, by its place.
        errors: What went wrong.
        loaded: Prompt tokens that were not computed.
        held: What it held, by when.
    """

    answers: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    loaded: int = 0
    held: dict[str, Held] = field(default_factory=dict)


def requests(rounds: int, count: int, models: Sequence[str] = (SERVED,)) -> list[list[Asked]]:
    """Return the requests of each round; always the same for the same numbers."""
    source = random.Random("soak")  # noqa: S311 - prompts, no secrets
    words = range(3, CONFIG["vocab_size"])
    texts = [tuple(source.choices(words, k=source.randrange(*LENGTHS))) for _ in range(TEXTS)]
    found = []
    for _ in range(rounds):
        one = []
        for _ in range(count):
            model = source.choice(models)
            end = tuple(source.choices(words, k=source.randrange(2, 2 * BLOCK)))
            one.append(Asked((*source.choice(texts), *end), model, source.random() < ABANDONED))
        found.append(one)
    return found


def soak(
    environment: Environment, scratch: Path, pipeline: str | None, rounds: list[list[Asked]], idle: float
) -> Soaked:
    """Serve all requests by two servers, one after the other, on one store, or without a connector."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    found = Soaked()
    memory = Path("/dev/shm") / f"ucm-soak-{os.getpid()}"  # noqa: S108 - deleted below
    transfer = None if pipeline is None else _transfer(scratch, memory, pipeline)
    number = 0
    try:
        for half in (1, 2):
            port = free_port()
            command = serve_command(environment, MODEL, transfer, port)
            command += f" --block-size {BLOCK} --max-num-seqs {CLIENTS}"
            if rounds[0][0].model != SERVED:
                modules = " ".join(f"{name}={DIRECTORY / name}" for name in ADAPTERS)
                command += f" --enable-lora --max-loras 2 --max-lora-rank {RANK} --lora-modules {modules}"
            told = variables(scratch, {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": ""})
            with Server(command, port, scratch / f"log-{half}.txt", told) as server:
                _ask(port, Asked((3,) * 4 * BLOCK, rounds[0][0].model, abandoned=False))
                found.held[f"server {half}, started"] = held(server.pid)
                for one in rounds[: len(rounds) // 2] if half == 1 else rounds[len(rounds) // 2 :]:
                    _round(port, one, number, found)
                    number += len(one)
                    server.post("/reset_prefix_cache")
                    print(f"{pipeline}: {number}, {held(server.pid)}", file=sys.stderr, flush=True)
                found.held[f"server {half}, at once"] = held(server.pid)
                if half > 1 and pipeline is not None:
                    time.sleep(idle)
                    found.held[f"server {half}, idle"] = held(server.pid)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return found


def _transfer(scratch: Path, memory: Path, pipeline: str) -> dict[str, Any]:
    store: dict[str, Any] = {"pipeline": pipeline}
    if "Posix" in pipeline:
        (scratch / "store").mkdir()
        store |= {"directories": str(scratch / "store"), "posix_capacity": CAPACITY}
    if pipeline != "Posix":
        memory.mkdir(mode=0o700)
        store |= {"dram_directory": str(memory / "store"), "dram_capacity": CAPACITY}
    found: dict[str, Any] = connector(store, "UCMConnector")["kv_transfer_config"]
    return found


def _round(port: int, asked: Sequence[Asked], first: int, found: Soaked) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        for number, answer in enumerate(clients.map(lambda one: _try(port, one), asked), first):
            if isinstance(answer, str):
                found.errors.append(answer)
            elif answer is not None:
                found.answers[number] = answer[0]
                found.loaded += answer[1]


def _try(port: int, asked: Asked) -> tuple[str, int] | str | None:
    try:
        return _ask(port, asked)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _ask(port: int, asked: Asked) -> tuple[str, int] | None:
    """Return the answer and how many tokens were not computed; None if the request was abandoned.

    Raises:
        ValueError: The server refused it.
    """
    body = {
        "model": asked.model,
        "prompt": asked.tokens,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": asked.abandoned,
    }
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if asked.abandoned and response.status == http.HTTPStatus.OK:
            response.readline()
            return None
        content = response.read()
    if response.status != http.HTTPStatus.OK:
        raise ValueError(f"{response.status}: {content.decode(errors='replace')}")
    answer = json.loads(content)
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["text"], cached


def held(group: int) -> Held:
    """Return what a process group holds; shared memory counts once."""
    found = Held()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or os.getpgid(int(entry.name)) != group:
                continue
            told = (entry / "smaps_rollup").read_text(encoding="utf-8")
            sizes = {name: int(size) / 1024 for name, size in _SIZE.findall(told)}
            found.memory += sizes["Pss"]
            found.anonymous += sizes["Pss_Anon"]
            found.shared += sizes["Pss_Shmem"]
            found.descriptors += len(list((entry / "fd").iterdir()))
            found.threads += len(list((entry / "task").iterdir()))
    return found


def figures(
    release: str, asked: list[list[Asked]], pipelines: Sequence[str] = PIPELINES, idle: float = IDLE
) -> Iterator[Figure]:
    """Compare answers, and yield the shared memory of an idle engine over the store's capacity."""
    environment = demo_environment(release)
    write_llama(environment.python, MODEL, LLAMA)
    for number, name in enumerate(ADAPTERS):
        _write_adapter(DIRECTORY / name, number)
    plain, *others = (soak(environment, DIRECTORY / "run", one, asked, idle) for one in (None, *pipelines))
    for when, of in plain.held.items():
        print(f"without a connector, {when}: {of}")
    for name, side in zip(pipelines, others, strict=True):
        print(f"{name}: {len(side.answers)} answers, {side.loaded} tokens not computed, {len(side.errors)} errors")
        for when, of in side.held.items():
            print(f"{name}, {when}: {of}")
        for error in side.errors[:5]:
            print(f"{name}: {error}")
        wrong = sum(side.answers.get(place) != text for place, text in plain.answers.items())
        detail = {"errors": len(side.errors), "held": {when: vars(of) for when, of in side.held.items()}}
        yield Figure(f"soak, {name}: answers that differ, of {len(plain.answers)}", wrong, "", 0.0, detail)
        shared = (side.held["server 2, idle"].shared - plain.held["server 2, at once"].shared) * (1 << 20) / CAPACITY
        yield Figure(f"soak, {name}: idle shared memory, to the store's capacity", shared, "", 1.0 + GOAL)


def _write_adapter(directory: Path, seed: int) -> None:
    targets = ("q_proj", "k_proj", "v_proj")
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": shape
        for layer in range(LAYERS)
        for name in targets
        for part, shape in (("A", (RANK, LLAMA["hidden_size"])), ("B", (KV_HEADS * HEAD, RANK)))
    }
    directory.mkdir(parents=True, exist_ok=True)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    weights = random_weights(shapes, random.Random(seed))  # noqa: S311 - weights, no secrets
    (directory / "adapter_model.safetensors").write_bytes(weights)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run some stores; return 0 if all goals are met."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.soak", description=__doc__)
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--pipelines", nargs="*", default=PIPELINES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of {REQUESTS} requests by default")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="in each round")
    parser.add_argument("--adapters", action="store_true", help="all requests use one of two LoRA adapters")
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds before an idle server is looked at")
    options = parser.parse_args(arguments)
    asked = requests(options.rounds, options.requests, ADAPTERS if options.adapters else (SERVED,))
    found = list(figures(options.release, asked, options.pipelines, options.idle))
    for figure in found:
        print(f"{figure.name}: {figure.value:.2f}, goal {figure.goal}: {'met' if figure.met else 'missed'}")
    return int(not all(figure.met for figure in found))


if __name__ == "__main__":
    sys.exit(main())
