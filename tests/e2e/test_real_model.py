"""A trained model generates the same text with each connector as without: cold, after a reset and a restart, over HTTP.

Everything runs in float32, in which the tokens do not depend on what else is computed in a step.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from tests.e2e.prefix_workload import request
from ucm.store.posix.files import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.e2e.prefix_engine import Answer, PrefixEngine
    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

BLOCK, LONGEST = 32, 2048
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 4 * LONGEST // BLOCK,
    "max_model_len": LONGEST,
    # Less than the prompts, so that they are computed in chunks.
    "max_num_batched_tokens": 512,
}
#: The settings of each connector; blending recomputes all of a stretch, so it is exact.
CONNECTORS: dict[str, dict[str, Any]] = {
    "UCMConnector": {},
    "UCMDirectConnector": {},
    "BlendConnector": {"blend": {"select": "edges", "edge_tokens": LONGEST, "min_tokens": BLOCK}},
}
#: The sections of the handbook in each prompt, from 0, and the question.
QUESTIONS = (
    ((0,), "When was the station built?"),
    ((0, 14, 15), "What is the name of the station's boat?"),
    ((14, 0, 5), "How many steps lead to the cove?"),
)
#: Generated tokens.
TOKENS = 32
#: How often prompts are asked for again until all their blocks are found, which takes a moment after a save.
ATTEMPTS = 50
BLENDED = ("ucm:blend_reused_tokens_total", "ucm:blend_computed_tokens_total")


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens, and where the sections are in it."""

    tokens: list[int]
    marks: list[list[int]]

    @property
    def blocks(self) -> int:
        """The tokens in whole blocks that are not computed if all of them are found."""
        return (len(self.tokens) - 1) // BLOCK * BLOCK

    def after(self, tokens: list[int]) -> Prompt:
        """Return the same prompt after other tokens."""
        return Prompt([*tokens, *self.tokens], [[len(tokens) + place for place in mark] for mark in self.marks])

    def request(self, *, marked: bool) -> Request:
        extra: dict[str, Any] = {"extra_args": {"kv_transfer_params": {"ucm_chunks": self.marks}}} if marked else {}
        return request(self.tokens, TOKENS, **extra)


@pytest.fixture(scope="module")
def model(release: str) -> Path:
    from tests.e2e.real.model import real_model  # noqa: PLC0415 - needs the build's packages

    return real_model()


@pytest.fixture(scope="module")
def prompts(environments: Environments, model: Path) -> list[Prompt]:
    from tests.e2e.real.text import HEAD, TAIL, encode, sections  # noqa: PLC0415 - needs the build's packages

    texts = sections()
    tails = [TAIL.format(question=question) for _, question in QUESTIONS]
    head, *encoded = encode(environments.plain.python, model, [HEAD, *texts, *tails])
    made = []
    for (chosen, _), tail in zip(QUESTIONS, encoded[len(texts) :], strict=True):
        tokens, marks = list(head), []
        for section in chosen:
            marks.append([len(tokens), len(tokens) + len(encoded[section])])
            tokens += encoded[section]
        made.append(Prompt([*tokens, *tail], marks))
    return made


def started(environments: Environments, directory: Path, model: Path, path: str = "", **engine: Any) -> PrefixEngine:
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS, INSIDE  # noqa: PLC0415

    environment = environments.runtime if engine else environments.plain
    arguments = {"model": str(model), **ENGINE, **engine}
    return PrefixEngine(environment, directory, arguments, {**IN_PROCESS, "PYTHONPATH": f"{INSIDE}{path}"})


@pytest.fixture(scope="module")
def plain(environments: Environments, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixEngine]:
    with started(environments, tmp_path_factory.mktemp("real") / "plain", model) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(plain: PrefixEngine, prompts: list[Prompt]) -> list[list[int]]:
    """The tokens that vLLM alone generates, each prompt computed as a whole."""
    answers = []
    for prompt in prompts:
        assert plain.reset()
        answers += plain.generate([prompt.request(marked=False)])
    assert "UCM" not in plain.log
    assert [answer.cached for answer in answers] == [0, 0, 0]
    assert len({tuple(answer.tokens) for answer in answers}) == len(prompts)
    return [answer.tokens for answer in answers]


def test_the_converted_model_answers_as_the_original_does(
    environments: Environments, plain: PrefixEngine, model: Path
) -> None:
    from tests.e2e.real.text import encode, with_tokenizer  # noqa: PLC0415 - needs the build's packages

    python, chat = environments.plain.python, [{"role": "user", "content": "What is the capital of France?"}]
    (prompt,) = with_tokenizer(python, model, chats=[chat])["chats"]
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    (tokens,) = encode(python, model, [prompt])
    assert (len(tokens), tokens[:3]) == (37, [1, 9690, 198])
    (answer,) = plain.generate([request(tokens, 8)])
    assert with_tokenizer(python, model, tokens=[answer.tokens])["tokens"] == [
        "The capital of France is Paris.<|im_end|>"
    ]


def test_the_tokenizer_merges_as_the_list_of_merges_says(environments: Environments, model: Path) -> None:
    """Every token is decoded, and texts are encoded, as a slow implementation does from the vocabulary and merges."""
    from tests.e2e.real.text import with_tokenizer  # noqa: PLC0415 - needs the build's packages

    content = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(content["model"]["merges"])}
    special = {token["content"] for token in content["added_tokens"]}
    byte_of = byte_characters()
    texts = [
        *(path.read_text(encoding="utf-8") for path in map(Path(__file__).with_name, ("model.py", "processes.py"))),
        "Tabs\tand  spaces   before 12345 and 3.14;\n\n\n  don't, I'LL \u2014 Gr\u00fc\u00dfe \u65e5\u672c \U0001f41f",
    ]
    found = with_tokenizer(
        environments.plain.python, model, texts=texts, tokens=[[number] for number in range(len(vocabulary))]
    )
    characters = {character: byte for byte, character in byte_of.items()}
    for token, number in vocabulary.items():
        spelt = token if token in special else bytes(characters[c] for c in token).decode("utf-8", "replace")
        assert found["tokens"][number] == spelt
    for text, tokens in zip(texts, found["texts"], strict=True):
        words = ("".join(byte_of[byte] for byte in word.encode()) for word in words_of(text))
        assert tokens == [vocabulary[piece] for word in words for piece in merged(word, ranks)]


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte: its own where that can be seen, else one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {**{byte: chr(byte) for byte in seen}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


def words_of(text: str) -> list[str]:
    """Split as the tokenizer does: first every digit, then contractions, words, signs and spaces."""
    word = r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
    return [
        found for part in re.split(r"(\d)", text) for found in ([part] if part.isdigit() else re.findall(word, part))
    ]


def merged(word: str, ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    """Merge the pair of the lowest rank until there is none."""
    pieces = list(word)
    while True:
        pairs = {pair: ranks[pair] for pair in pairwise(pieces) if pair in ranks}
        if not pairs:
            return pieces
        best, made = min(pairs, key=lambda pair: pairs[pair]), []
        while pieces:
            width = 2 if tuple(pieces[:2]) == best else 1
            made.append("".join(pieces[:width]))
            pieces = pieces[width:]
        pieces = made


def each(engine: PrefixEngine, prompts: list[Prompt], *, marked: bool) -> Iterator[Answer]:
    for prompt in prompts:
        yield engine.generate([prompt.request(marked=marked)])[0]


def until_found(engine: PrefixEngine, prompts: list[Prompt], wanted: list[list[int]], *, marked: bool) -> None:
    """Ask after a reset until every whole block is found; each answer on the way must be the wanted one."""
    for _ in range(ATTEMPTS):
        assert engine.reset()
        answers = list(each(engine, prompts, marked=marked))
        assert [answer.tokens for answer in answers] == wanted
        if [answer.cached for answer in answers] == [prompt.blocks for prompt in prompts]:
            return
    pytest.fail(f"{[answer.cached for answer in answers]} tokens were found\n{engine.log[-4000:]}")


@pytest.mark.parametrize("name", CONNECTORS)
def test_the_tokens_are_vllms_own(
    environments: Environments, model: Path, prompts: list[Prompt], wanted: list[list[int]], tmp_path: Path, name: str
) -> None:
    from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415 - needs the build's packages

    engine = connector(posix(tmp_path / "store"), name, **CONNECTORS[name])
    with started(environments, tmp_path / "cold", model, **engine) as cold:
        assert [answer.tokens for answer in each(cold, prompts, marked=False)] == wanted
        until_found(cold, prompts, wanted, marked=False)
    with started(environments, tmp_path / "restarted", model, **engine) as restarted:
        answers = restarted.generate([prompt.request(marked=False) for prompt in prompts])
        assert [answer.tokens for answer in answers] == wanted
        assert [answer.cached for answer in answers] == [prompt.blocks for prompt in prompts]


def test_the_tokens_are_vllms_own_with_compressed_blocks(
    environments: Environments, model: Path, prompts: list[Prompt], wanted: list[list[int]], tmp_path: Path
) -> None:
    """Cold, after a reset and a restart, and with damaged blocks, which are computed and compressed again."""
    from tests.e2e.prefix_damage import flip  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415

    packages = tmp_path / "packages"
    packages.mkdir()
    origin = Path(zstandard.__path__[0])
    (packages / origin.name).symlink_to(origin)
    store = {**posix(tmp_path / "store"), "tiers": {"Posix": {"compression": "lossless"}}}
    path = f":{packages}"
    engine: dict[str, Any] = connector(store)
    with started(environments, tmp_path / "cold", model, path, **engine) as cold:
        assert [answer.tokens for answer in each(cold, prompts, marked=False)] == wanted
        until_found(cold, prompts, wanted, marked=False)
    files = list(block_files(tmp_path / "store").values())
    headers = [read_header(str(file)) for file in files]
    assert all(header.is_compressed for header in headers)
    assert sum(file.stat().st_size for file in files) < 0.87 * sum(header.file_nbytes for header in headers)
    with started(environments, tmp_path / "restarted", model, path, **engine) as restarted:
        answers = restarted.generate([prompt.request(marked=False) for prompt in prompts])
        assert [answer.tokens for answer in answers] == wanted
        assert [answer.cached for answer in answers] == [prompt.blocks for prompt in prompts]
    for file in files[::4]:
        flip(file, file.stat().st_size // 2)
    with started(environments, tmp_path / "damaged", model, path, **engine) as damaged:
        answers = list(each(damaged, prompts, marked=False))
        assert [answer.tokens for answer in answers] == wanted
        assert sum(answer.cached or 0 for answer in answers) < sum(prompt.blocks for prompt in prompts)
        # Counters of tiers are read every five seconds, which a fast machine does not need.
        assert "load.corrupt in tier posix" in damaged.log
        assert list((tmp_path / "store").rglob("*-corrupt"))
        until_found(damaged, prompts, wanted, marked=False)
    assert all(read_header(str(file)).is_compressed for file in block_files(tmp_path / "store").values())


def test_sections_in_another_order_are_exact_where_all_of_them_is_recomputed(
    environments: Environments, model: Path, prompts: list[Prompt], wanted: list[list[int]], tmp_path: Path
) -> None:
    from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415 - needs the build's packages

    name = "BlendConnector"
    engine = connector(posix(tmp_path / "store"), name, **CONNECTORS[name])
    last, text = prompts[-1], wanted[-1]
    # A section is stored as it is computed at the beginning of a prompt.
    alone = [Prompt(last.tokens[begin:end], [[0, end - begin]]) for begin, end in last.marks]
    in_sections = sum(end - begin for begin, end in last.marks)
    with started(environments, tmp_path / "engine", model, **engine) as blending:

        def blended(prompt: Prompt) -> tuple[float, list[int]]:
            """The tokens of blended stretches, and the answer."""
            before = blending.counters()
            (answer,) = blending.generate([prompt.request(marked=True)])
            after = blending.counters()
            return sum(after[counter] - before[counter] for counter in BLENDED), answer.tokens

        for attempt in range(ATTEMPTS):
            for section in alone:
                blended(section)
            # A prompt with a beginning of its own has no exact hit, so it tells whether the sections are found.
            found, _ = blended(last.after([attempt + 100] * BLOCK))
            if found > in_sections - len(alone) * BLOCK:
                break
            assert blending.reset()
        found, tokens = blended(last)
        assert tokens == text
        assert found > in_sections - len(alone) * BLOCK


def test_wrong_values_are_noticed(
    environments: Environments, model: Path, prompts: list[Prompt], wanted: list[list[int]], tmp_path: Path
) -> None:
    """The comparison can fail: it notices a connector that loads KV of the other sign into one of thirty layers."""
    from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415 - needs the build's packages

    right = connector(posix(tmp_path / "store"))
    with started(environments, tmp_path / "cold", model, **right) as cold:
        until_found(cold, prompts, wanted, marked=False)
    transfer = {**right["kv_transfer_config"], "kv_connector": "WrongValuesConnector"}
    wrong: dict[str, Any] = {"kv_transfer_config": {**transfer, "kv_connector_module_path": "wrong_values"}}
    with started(environments, tmp_path / "wrong", model, **wrong) as engine:
        answers = list(each(engine, prompts, marked=False))
    assert [answer.cached for answer in answers] == [prompt.blocks for prompt in prompts]
    assert all(answer.tokens != right for answer, right in zip(answers, wanted, strict=True))


def test_over_http_the_text_is_vllms_own(environments: Environments, model: Path, tmp_path: Path) -> None:
    """Chats with streaming: with one server's connector cold and after a reset, and with another one's later."""
    from tests.e2e.demo import demo_environment, prepare  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.real.chat import Server, chat, serve_command  # noqa: PLC0415
    from tests.e2e.real.text import sections  # noqa: PLC0415
    from tests.ports import free_port  # noqa: PLC0415

    environment, transfer = demo_environment(environments.release), prepare(tmp_path / "ours")
    texts = sections()
    bodies = [chat(asked, text="".join(texts[n] for n in chosen), tokens=TOKENS) for chosen, asked in QUESTIONS[:2]]
    ours = ("UCM_", "VLLM_", "PYTHON", "PYTEST_")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    # With this, a server can be asked to empty its prefix cache.
    variables["VLLM_SERVER_DEV_MODE"] = "1"

    def server(name: str, transfer: dict[str, object] | None) -> Server:
        port = free_port()
        return Server(serve_command(environment, model, transfer, port), port, tmp_path / f"{name}.txt", variables)

    with server("plain", None) as plain:
        texts_wanted = [plain.ask(body).text for body in bodies]
    assert len(set(texts_wanted)) == len(bodies)
    assert "1907" in texts_wanted[0]
    with server("cold", transfer) as cold:
        assert [cold.ask(body).text for body in bodies] == texts_wanted
        for _ in range(ATTEMPTS):
            cold.post("/reset_prefix_cache")
            replies = [cold.ask(body) for body in bodies]
            assert [reply.text for reply in replies] == texts_wanted
            if all(reply.cached for reply in replies):
                break
        assert all(reply.cached for reply in replies)
    with server("restarted", transfer) as restarted:
        replies = [restarted.ask(body) for body in bodies]
    assert [reply.text for reply in replies] == texts_wanted
    assert [reply.cached > reply.prompt // 2 for reply in replies] == [True, True]
