"""Judge a trained model beyond its trained length, by ways to see distances: `real_beyond.py SPEC RESULT`, JSON files.

Each run computes one text, or a part of it, and tells the loss of each of its tokens. At some places it is asked
questions, whose answers are given (teacher forcing): an answer is right if the model would have said all of its tokens.

The attention is that of the formulas, and for the far part the keys are those before any rotation; it shares nothing
with `ucm.sparse.rerope`. A test compares it with a reference.
"""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tests.e2e.inside.real_judge import Model, turning
else:
    Model, turning = (getattr(import_module("real_judge"), name) for name in ("Model", "turning"))

#: Tokens computed at once.
CHUNK = 256


def frequencies(model: Model, base: float | None = None, yarn: float | None = None, trained: int = 0) -> Tensor:
    """Return how fast each pair of a head turns, ``[head / 2]``.

    Args:
        model: The model.
        base: Another base than the model's (NTK-aware scaling).
        yarn: How many times longer than the trained length contexts get, for YaRN (arXiv:2309.00071).
        trained: The trained length.
    """
    head, base = model.head, base or model.base
    pairs = torch.arange(0, head, 2).double()
    found = base ** -(pairs / head)
    if yarn is None:
        return found

    def pair_that_turns(times: int) -> float:
        return float(head * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base)))

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), head - 1)
    slowed = ((torch.arange(head // 2).double() - low) / (high - low)).clamp(0, 1)
    return found * (1 - slowed) + found / yarn * slowed


class Beyond(Model):
    """The model, with a way to see distances, and the KV of a text.

    Args:
        directory: The model.
        length: The most tokens.
        base: See `frequencies`.
        yarn: See `frequencies`.
        window: Distances below this one are as they are, all others are this one (ReRoPE); None: all are.
        trained: The trained length. With a window, scores of later queries grow with their position's logarithm.
    """

    def __init__(
        self,
        directory: Path,
        length: int,
        base: float | None = None,
        yarn: float | None = None,
        window: int | None = None,
        trained: int | None = None,
    ) -> None:
        super().__init__(directory)
        self._frequencies = frequencies(self, base, yarn, trained or 0)
        self._scale = 1.0 if yarn is None else 0.1 * math.log(yarn) + 1
        self._window, self._trained = window, trained if window else None
        shape = (self.layers, self.kv_heads, length, self.head)
        self._keys, self._values = torch.empty(shape), torch.empty(shape)
        self._unrotated = torch.empty(shape if window else (0,))

    def turning(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """Leave queries and keys to the attention."""
        del positions
        return lambda x: x

    def compute(self, tokens: Sequence[int], begin: int) -> Tensor:
        """Return the logits behind each of these tokens, which are the text's from a position on."""
        positions = torch.arange(begin, begin + len(tokens))
        turn = turning(positions, self._frequencies, self._scale)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            end = begin + len(q)
            self._values[layer, :, begin:end] = v.transpose(0, 1)
            self._keys[layer, :, begin:end] = turn(k).transpose(0, 1)
            if self._trained:
                q = q * (torch.log(positions + 1.0) / math.log(self._trained)).clamp(min=1)[:, None, None]
            if self._window is None:
                return self._read(layer, turn(q), self._keys, positions, 0, end)[0]
            self._unrotated[layer, :, begin:end] = k.transpose(0, 1)
            first, far = max(0, begin - self._window + 1), end - self._window
            read = self._read(layer, turn(q), self._keys, positions, first, end)
            if far <= 0:
                return read[0]
            stands = turning(torch.full((len(q),), self._window), self._frequencies)
            return _merged(read, self._read(layer, stands(q), self._unrotated, positions - self._window, 0, far))

        return self.logits(self.run(torch.tensor(tokens), positions, attend))

    def _read(
        self, layer: int, q: Tensor, keys: Tensor, positions: Tensor, first: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Return attention, ``[n, num_heads, head]``, and its log-sum-exp, ``[n, num_heads]``.

        Args:
            layer: The layer.
            q: Its queries.
            keys: Which keys.
            positions: ``[n]``: the last key that each query may see. Of the window's keys, none is too far away.
            first: The first key that is read.
            end: The end of the keys that are read.
        """
        places, window = torch.arange(first, end), self._window
        hidden = places > positions[:, None]
        if window is not None and keys is self._keys:
            hidden |= places <= positions[:, None] - window
        # The queries that share keys are rows of one matrix.
        rows = q.unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0, 3)
        group = rows.shape[1]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")).repeat(group, 1)
        found, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows.flatten(1, 2)[None],
            keys[layer, :, first:end][None],
            self._values[layer, :, first:end][None],
            attn_mask=mask,
        )
        nothing = hidden.all(1)
        output = found[0].unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        sums = logs[0].unflatten(1, (group, -1)).permute(2, 0, 1).flatten(1)
        return output.masked_fill(nothing[:, None, None], 0.0), sums.masked_fill(nothing[:, None], float("-inf"))


def _merged(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> Tensor:
    """Return attention over two sets of keys, from that over each."""
    shares = torch.stack((one[1], two[1])).softmax(0)[..., None]
    return one[0] * shares[0] + two[0] * shares[1]


def run(model: Beyond, tokens: Sequence[int], asked: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the loss of each token after the first, and which answers are right, by the place where they are asked.

    Args:
        model: A model without KV.
        tokens: The text.
        asked: By place, ``tail`` and ``answer`` of each question, and from where on the answer is judged, ``begin``.
    """
    losses: list[float] = []
    right: dict[int, list[bool]] = {}
    done = 0
    for stop in sorted({*asked, len(tokens)}):
        while done < stop:
            end = min(done + CHUNK, stop)
            told = model.compute(tokens[done:end], done).log_softmax(-1)
            following = torch.tensor(tokens[done + 1 : end + 1])
            losses += told[: len(following)].gather(1, following[:, None])[:, 0].neg().tolist()
            done = end
        for one in asked.get(stop, ()):
            answer = torch.tensor(one["answer"])
            said = model.compute([*one["tail"], *one["answer"][:-1]], stop).argmax(-1)[-len(answer) :]
            right.setdefault(stop, []).append(bool((said == answer)[one["begin"] :].all()))
    return {"losses": losses, "right": right}


def main(spec_file: Path, result_file: Path) -> None:
    """Run all, one after the other."""
    torch.set_num_threads(1)
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    with torch.no_grad(), result_file.open("a", encoding="utf-8") as results:
        for one in spec["runs"]:
            tokens = spec["tokens"][one["begin"] : one["end"]]
            asked = {int(place): of for place, of in one.get("asked", {}).items()}
            model = Beyond(Path(spec["model"]), len(tokens) + CHUNK, **one["way"])
            print(json.dumps({"name": one["name"], "begin": one["begin"], **run(model, tokens, asked)}), file=results)
            results.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
