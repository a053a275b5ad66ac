"""``ucm store lookup``: which blocks of a prompt are stored, and in which tiers."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from ucm.commands.options import many, say, say_json, table
from ucm.commands.store.prompt import given_prompt
from ucm.debug import find_blocks, hit_length

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ucm.commands.store.prompt import Prompt
    from ucm.debug import FoundBlocks


def run(options: argparse.Namespace) -> int:
    """Look up, and print; 1 if a tier does not answer.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used.
    """
    prompt = given_prompt(options)
    found, loaded = find(prompt)
    say_json(data_of(prompt, found, loaded)) if options.json else say(_text(found, len(prompt.token_ids), loaded))
    return int(any(one.silent for one in found))


def find(prompt: Prompt) -> tuple[list[FoundBlocks], int]:
    """Return where the blocks of a prompt are stored, and how many tokens an engine would load.

    Raises:
        UcmError: A tier cannot be opened, or the engine would not cache this prompt.
    """
    found = find_blocks(prompt.settings, prompt.facts, prompt.token_ids, prompt.salt)
    groups, present = [one.stored.group for one in found], [one.present for one in found]
    return found, hit_length(prompt.settings, groups, present, len(prompt.token_ids))


def data_of(prompt: Prompt, found: Sequence[FoundBlocks], loaded: int) -> dict[str, Any]:
    """Return what ``find`` found as ``--json`` prints it."""
    return {"tokens": len(prompt.token_ids), "found_tokens": loaded, "groups": [_data(one) for one in found]}


def _tiers_of(found: FoundBlocks) -> list[tuple[str, ...]]:
    """Return the tiers that have each block."""
    return [tuple(name for name, there in found.tiers.items() if there[at]) for at in range(len(found.keys))]


def _data(found: FoundBlocks) -> dict[str, Any]:
    return {
        "group": found.stored.group.index,
        "namespace": found.stored.namespace,
        "block_tokens": found.stored.group.chunk_tokens,
        "silent": dict(found.silent),
        "blocks": [
            {"key": key.hex(), "tiers": list(tiers)} for key, tiers in zip(found.keys, _tiers_of(found), strict=True)
        ],
    }


def _text(found: Sequence[FoundBlocks], tokens: int, loaded: int) -> list[str]:
    lines = [f"An engine with an empty KV cache would load {loaded:,} of {many(tokens, 'token', 'tokens')}."]
    for one in found:
        size, units = one.stored.group.chunk_tokens, one.stored.group.stored_as
        lines += ["", f"{one.stored.namespace}: {many(len(one.keys), units.removesuffix('s'), units)} of {size} tokens"]
        rows = [(units, "tokens", "stored in", "first key")]
        at = 0
        for tiers, run_of in groupby(_tiers_of(one)):
            end = at + len(list(run_of))
            where = ", ".join(tiers) or "-"
            rows.append((f"{at}-{end - 1}", f"{at * size}-{end * size - 1}", where, one.keys[at].hex()))
            at = end
        if at:
            lines += [f"  {line}" for line in table(rows)]
        lines += [f"  {name} does not answer: {causes}" for name, causes in one.silent.items()]
    return lines
