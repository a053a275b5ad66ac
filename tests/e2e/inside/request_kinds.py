"""Engines that serve requests of many kinds, each in a fork of this process: `request_kinds.py SPEC RESULT`.

The specification has the model, the arguments of ``LLM`` without and with UCM's connector, a directory
for LoRA adapters, and further arguments of some engines, by name. The result has the answers of each engine, by name:
of every request its generated tokens, or its pooled values, and the number of prompt tokens that were not computed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

if TYPE_CHECKING:
    from collections.abc import Callable

Answers = dict[str, list[tuple[Any, int]]]
LENGTHS = (40, 100, 300)
#: Samples of a second of sound.
RATE = 16_000
_GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
_numbers = itertools.count()


def prompt(length: int) -> list[int]:
    """Return random tokens, always the same for a length."""
    source = random.Random(length)  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, 512) for _ in range(length)]


def serve(llm: Any, requests: list[tuple[dict[str, Any], Any, dict[str, Any]]]) -> list[tuple[Any, int]]:
    """Answer requests that arrive at once: their prompts, parameters and further arguments of ``add_request``."""
    names = []
    for text, params, more in requests:
        names.append(f"request {next(_numbers)}")
        llm.llm_engine.add_request(names[-1], text, params, **more)
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            pooled = getattr(output.outputs, "data", None)
            value = [list(one.token_ids) for one in output.outputs] if pooled is None else pooled.tolist()
            found[output.request_id] = (value, output.num_cached_tokens)
    return [found[name] for name in names]


def empty(llm: Any) -> None:
    """Empty vLLM's own prefix cache when everything is stored."""
    from vllm import PoolingParams, SamplingParams  # noqa: PLC0415 - not in the test's process

    pools = llm.llm_engine.vllm_config.model_config.runner_type == "pooling"
    params = PoolingParams(task="embed") if pools else SamplingParams(max_tokens=1)
    import_module("settling").settle(llm, lambda: serve(llm, [({"prompt_token_ids": [5, 6, 7]}, params, {})]))
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM's own prefix cache could not be emptied")


def generating(llm: Any, spec: dict[str, Any]) -> Answers:
    """Serve embeddings, salts, priorities, several answers, structured output and log-probabilities, twice."""
    from vllm import SamplingParams  # noqa: PLC0415 - not in the test's process
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

    weights = import_module("safetensors.torch").load_file(Path(spec["model"]) / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    rows = [table[prompt(length)] for length in LENGTHS]
    others = [one.clone() for one in rows]
    for one in others:
        one[5] = table[77]
    tokens = [{"prompt_token_ids": prompt(length)} for length in LENGTHS]
    crowd = [{"prompt_token_ids": prompt(length)} for length in range(150, 390, 30)]

    def params(count: int = 6, **more: Any) -> Any:
        return SamplingParams(max_tokens=count, **{**_GREEDY, **more})

    choice = params(structured_outputs=StructuredOutputsParams(choice=["w10 w11", "w12 w13"]), ignore_eos=False)
    kinds: dict[str, list[tuple[dict[str, Any], Any, dict[str, Any]]]] = {
        "embeddings": [({"prompt_embeds": one}, params(), {}) for one in rows],
        "other embeddings": [({"prompt_embeds": one}, params(), {}) for one in others],
        "one salt": [({**one, "cache_salt": "one"}, params(), {}) for one in tokens],
        "another salt": [({**one, "cache_salt": "another"}, params(), {}) for one in tokens],
        "tokens": [(one, params(), {}) for one in tokens],
        "several answers": [(one, params(n=2, temperature=0.5, top_k=1), {}) for one in tokens],
        "structured": [(one, choice, {}) for one in tokens],
        "not read from caches": [(one, params(skip_reading_prefix_cache=True), {}) for one in tokens],
        "priorities": [(one, params(60), {"priority": -number}) for number, one in enumerate(crowd)],
    }
    found: Answers = {}
    for again in ("", " again"):
        for name, requests in kinds.items():
            found[name + again] = serve(llm, requests)
        found["prompt logprobs" + again] = [serve(llm, [(one, params(prompt_logprobs=1), {})])[0] for one in tokens]
        empty(llm)
    return found


def pooling(llm: Any, spec: dict[str, Any]) -> Answers:
    """Embed whole prompts and each token of them, twice."""
    from vllm import PoolingParams  # noqa: PLC0415

    found: Answers = {}
    for again in ("", " again"):
        for task in ("embed", "token_embed"):
            params = PoolingParams(task=task)
            found[task + again] = serve(llm, [({"prompt_token_ids": prompt(n)}, params, {}) for n in LENGTHS])
        empty(llm)
    return found


def write_adapter(directory: Path, seed: int) -> None:
    """Write a LoRA adapter of random weights for the tiny Llama."""
    import torch  # noqa: PLC0415

    directory.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer, (name, rows) in itertools.product(range(4), {"q_proj": 128, "k_proj": 64, "v_proj": 64}.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = 0.3 * torch.randn(8, 128)
        tensors[f"{prefix}.lora_B.weight"] = 0.3 * torch.randn(rows, 8)
    import_module("safetensors.torch").save_file(tensors, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**about, "bias": "none"}), encoding="utf-8")


def adapting(llm: Any, spec: dict[str, Any]) -> Answers:
    """Replace an adapter's files: loaded in place, then removed and added again, under one name, number and path."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    adapters, path = Path(spec["adapters"]), Path(spec["adapters"]) / "changing"
    params = SamplingParams(max_tokens=6, **_GREEDY)
    found: Answers = {}

    def ask(what: str, number: int, where: Path, *, inplace: bool = False) -> None:
        lora = LoRARequest(f"adapter {number}", number, str(where), load_inplace=inplace)
        texts = [{"prompt_token_ids": prompt(length)} for length in LENGTHS]
        found[what] = [serve(llm, [(one, params, {"lora_request": lora})])[0] for one in texts]
        empty(llm)

    def put(seed: int) -> None:
        shutil.rmtree(path)
        shutil.copytree(adapters / str(seed), path)

    ask("1", 1, path)
    ask("1 again", 1, path)
    put(2)
    ask("2 in place", 1, path, inplace=True)
    ask("2 again", 1, path)
    llm.llm_engine.remove_lora(1)
    put(3)
    ask("3 anew", 1, path)
    ask("3 again", 1, path)
    for seed in (1, 2, 3):
        ask(f"{seed} elsewhere", 1 + seed, adapters / str(seed))
    return found


def hearing(llm: Any, spec: dict[str, Any]) -> Answers:
    """Serve sounds within one text: alone, two in either order, and one under a client's name, twice."""
    asked = {"one": [1], "other": [2], "both": [1, 2], "turned": [2, 1], "named": [1]}
    found: Answers = {}
    for again in ("", " again"):
        for what, sounds in asked.items():
            found[what + again] = serve(llm, [_with_sounds(spec, sounds, named=what == "named")])
        empty(llm)
    return found


def hearing_later(llm: Any, spec: dict[str, Any]) -> Answers:
    """Serve another sound under the name of one that an earlier engine served, and that one without a name."""
    named = _with_sounds(spec, [3], named=True)
    return {"another under the name": serve(llm, [named]), "one": serve(llm, [_with_sounds(spec, [1])])}


def hearing_names(llm: Any, spec: dict[str, Any]) -> Answers:
    """Serve two sounds by turns under one name, which vLLM hears as the first one unless its caches are emptied."""
    found: Answers = {}
    for again in ("", " again"):
        for sound in (4, 5):
            found[f"{sound}{again}"] = serve(llm, [_with_sounds(spec, [sound], named=True)])
        empty(llm)
    return found


def hearing_after(llm: Any, spec: dict[str, Any]) -> Answers:
    """Serve the same sounds without a name."""
    return {str(sound): serve(llm, [_with_sounds(spec, [sound])]) for sound in (4, 5)}


def _with_sounds(
    spec: dict[str, Any], sounds: list[int], *, named: bool = False
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return a request with tones of a second, by number, with 70 tokens before the first and 40 after each."""
    from vllm import SamplingParams  # noqa: PLC0415

    tokens, data = prompt(70), []
    for number in sounds:
        tokens += [spec["sound"], *prompt(40)]
        data.append((np.sin(np.arange(RATE) * (0.3 * number)).astype(np.float32), RATE))
    text = {"prompt_token_ids": tokens, "multi_modal_data": {"audio": data}}
    names = {"multi_modal_uuids": {"audio": [spec["name"]]}} if named else {}
    return {**text, **names}, SamplingParams(max_tokens=12, **_GREEDY), {}


ENGINES: dict[str, tuple[Callable[[Any, dict[str, Any]], Answers], dict[str, Any]]] = {
    "generating": (generating, {"enable_prompt_embeds": True, "scheduling_policy": "priority"}),
    "pooling": (pooling, {"runner": "pooling", "convert": "embed"}),
    "hearing": (hearing, {}),
    "hearing later": (hearing_later, {}),
    "hearing names": (hearing_names, {}),
    "hearing after": (hearing_after, {}),
    "adapting": (adapting, {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 8}),
}


def run(name: str, arguments: dict[str, Any], spec: dict[str, Any], result: Path) -> None:
    """Run an engine in a fork of this process."""
    time.sleep(0.1)  # files count if they are older than the process, in ticks of its clock
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        from vllm import LLM  # noqa: PLC0415

        play, more = ENGINES[name]
        answers = play(LLM(**{**arguments, **more}), spec)
        result.write_text(json.dumps(answers), encoding="utf-8")
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
        os._exit(1)
    sys.exit()


def main(spec_file: Path, result_file: Path) -> None:
    """Run each engine without and with the connector; one that fails has no answers."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    for name in ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        import_module(name)
    adapters = Path(spec["adapters"])
    for seed in (1, 2, 3):
        write_adapter(adapters / str(seed), seed)
    found = {}
    for name in ENGINES:
        for side in ("plain", "ours"):
            shutil.rmtree(adapters / "changing", ignore_errors=True)
            shutil.copytree(adapters / "1", adapters / "changing")
            result = result_file.with_name(f"{name}-{side}.json")
            run(name, {**spec[side], **spec["engines"].get(name, {})}, spec, result)
            found[f"{name} {side}"] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
