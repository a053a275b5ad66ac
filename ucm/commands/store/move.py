"""``ucm store prefetch`` and ``ucm store demote``: copy a prompt's blocks into the first tier, or delete them there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.commands.options import many, say, say_json
from ucm.commands.store.lookup import find
from ucm.commands.store.prompt import given_prompt
from ucm.config.settings import format_size
from ucm.debug import hit_length
from ucm.errors import UcmError
from ucm.store.base import BlockMissingError, StoreError
from ucm.store.factory import authenticator_of, back_end_class, is_tier, open_tier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ucm.commands.store.prompt import Prompt
    from ucm.store.base import BlockKey
    from ucm.store.tier import Tier

#: Blocks that are copied at once, as most media serve some requests sooner together than one after the other.
_THREADS = 4


def run(options: argparse.Namespace) -> int:
    """Copy or delete, and print.

    1 if the first tier then lacks a block that was to be there, or has one too many, or if a tier that may have some
    does not answer.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used, or the store has one tier.
    """
    prompt = given_prompt(options)
    data = prefetch(prompt) if options.into else demote(prompt)
    tier, failed = data["tier"], data["failed"]
    if options.json:
        say_json(data)
    elif options.into:
        of_all = many(data["blocks"], "block", "blocks")
        say([f"{tier}: {data['there']:,} of {of_all}, {data['copied']:,} of them copied"])
        say([f"An engine loads {many(data['tokens'], 'token', 'tokens')} from there."] if not _lacks(data) else ())
    else:
        say([f"{tier}: {many(data['deleted'], 'block', 'blocks')} deleted, which {' or '.join(data['lower'])} has"])
        say([f"{tier}: {many(data['kept'], 'block', 'blocks')} kept, which no other tier has"] if data["kept"] else ())
    if not options.json:
        say(f"{name}: {reason}" for name, reason in failed.items())
    return int(bool(failed) or (options.into and _lacks(data)))


def prefetch(prompt: Prompt) -> dict[str, Any]:
    """Copy the blocks that an engine would load for a prompt into the first tier; return what ``--json`` prints.

    Blocks are verified as they are read, and decompressed. All ranks' blocks are copied.

    Raises:
        UcmError: The store has one tier, a tier cannot be opened, or the blocks take more than the first tier may hold.
    """
    first, lower = _tiers_of(prompt)
    found, tokens = find(prompt)
    config, authenticator = prompt.config, authenticator_of(prompt.config, of_tool=True)
    compresses = config.tiers.get(first, {}).get("compression", "none") != "none"
    if compresses and any(one.stored.geometry_of_all is None for one in found):
        raise UcmError(
            "blocks of several ranks cannot be prefetched into a tier that compresses",
            where=f"store: tiers: {first}: compression",
            fix="let the engine copy them as it uses them",
        )
    counts = dict.fromkeys(("blocks", "there", "copied"), 0)
    failed, silent = dict[str, str](), dict[str, str]()
    groups, whole = [one.stored.group for one in found], [[True] * len(one.keys) for one in found]
    if tokens < hit_length(prompt.settings, groups, whole, len(prompt.token_ids)):  # a silent tier may have the rest
        silent = {name.lower(): f"does not answer: {causes}" for one in found for name, causes in one.silent.items()}
    nbytes, moves = 0, []
    with ExitStack() as stack:
        for one in found:
            stored = one.stored
            depths = {one.keys[chunk]: stored.group.depth(chunk) for chunk in stored.group.needed(0, tokens)}
            # Without the geometry, which may differ between ranks, a block's own header suffices to read it.
            geometry = stored.geometry_of_all
            for namespace in stored.ranks if depths else ():
                top, *others = (
                    stack.enter_context(closing(open_tier(config, name, namespace, authenticator, geometry)))
                    for name in (first, *lower)
                )
                counts["blocks"] += len(depths)
                if (absent := _lacking(top, list(depths), failed)) is not None:
                    nbytes += len(depths) * _nbytes(others, absent, failed)
                    moves.append((top, others, depths, absent))
        capacity = moves[0][0].stats().capacity_bytes if moves else None
        if capacity is not None and nbytes > capacity:
            raise UcmError(
                f"these blocks take {format_size(nbytes)}, and {first} may hold {format_size(capacity)}",
                where="store",
                fix=f"raise the capacity of {first}, or prefetch a shorter prompt",
            )
        threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
        for top, others, depths, absent in moves:
            for reasons in threads.map(partial(_copy, top, others), absent):
                counts["copied"] += not reasons
                failed = reasons | failed  # the first reason says most: a damaged block is then missing
            if (absent := _lacking(top, list(depths), failed)) is not None:
                counts["there"] += len(depths) - len(absent)
            top.renew(depths)
    # What one tier could not give, another one, or an engine, may have given.
    return {"tier": first, "tokens": tokens, **counts, "failed": failed | silent if _lacks(counts) else silent}


def demote(prompt: Prompt) -> dict[str, Any]:
    """Delete the blocks of a prompt from the first tier if another tier has them; return what ``--json`` prints.

    Raises:
        UcmError: The store has one tier, or a tier cannot be opened.
    """
    first, lower = _tiers_of(prompt)
    deleted, kept, failed = 0, 0, dict[str, str]()
    for stored, keys in prompt.groups():
        for namespace in stored.ranks if keys else ():
            with ExitStack() as stack:
                top, *others = (
                    stack.enter_context(closing(open_tier(prompt.config, name, namespace))) for name in (first, *lower)
                )
                tier = top
                try:
                    absent = set(_absent(top, keys))
                    there = alone = [key for key in keys if key not in absent]
                    for tier in others:
                        alone = _absent(tier, alone)
                    tier = top
                    staying = set(alone)
                    deleted += top.drop([key for key in there if key not in staying])
                    kept += len(alone)
                except StoreError as error:
                    failed[tier.name] = error.what
    return {"tier": first, "lower": lower, "deleted": deleted, "kept": kept, "failed": failed}


def _tiers_of(prompt: Prompt) -> tuple[str, list[str]]:
    """Return the name of the first tier and those of the others.

    Raises:
        UcmError: There are no others, or the store is not made of tiers.
    """
    config = prompt.config
    first, *lower = config.parts
    if not lower or not all(is_tier(back_end_class(name)) for name in config.parts):
        raise UcmError(
            f"the store {config.pipeline!r} has one tier",
            where="store: pipeline",
            fix="put a faster tier before it, for instance Dram|Posix",
        )
    return first, lower


def _absent(tier: Tier, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return the blocks that a tier does not have, in order.

    Raises:
        StoreError: It does not answer.
    """
    there = tier.contains(keys, tier.clock.monotonic() + tier.timeout)
    return [key for key, has in zip(keys, there, strict=True) if not has]


def _lacking(tier: Tier, keys: Sequence[BlockKey], failed: dict[str, str]) -> list[BlockKey] | None:
    """Return the same; None, and why, if the tier does not answer."""
    try:
        return _absent(tier, keys)
    except StoreError as error:
        failed.setdefault(tier.name, error.what)
        return None


def _nbytes(tiers: Sequence[Tier], keys: Sequence[BlockKey], failed: dict[str, str]) -> int:
    """Return the size of the first of these blocks that a tier returns, as they are alike; 0, and why, if none does."""
    for key in keys:
        for tier in tiers:
            try:
                return tier.read_file(key, tier.clock.monotonic() + tier.transfer_timeout).nbytes
            except BlockMissingError:
                pass
            except StoreError as error:
                failed.setdefault(tier.name, error.what)
    return 0


def _copy(top: Tier, others: Sequence[Tier], key: BlockKey) -> dict[str, str]:
    """Copy a block from the first other tier that returns it; if none does, return why, by the tiers' names."""
    failed = {}
    for tier in others:
        source = tier
        try:
            content = tier.read_file(key, tier.clock.monotonic() + tier.transfer_timeout)
            source = top
            top.put(key, [content], top.clock.monotonic() + top.transfer_timeout)
        except StoreError as error:
            failed[source.name] = error.what
        else:
            return {}
    return failed


def _lacks(data: dict[str, Any]) -> bool:
    """Return whether the first tier lacks blocks of the prompt."""
    return bool(data["there"] < data["blocks"])
