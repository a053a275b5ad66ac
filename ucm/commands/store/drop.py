"""``ucm store drop``: delete the blocks of a prompt from every tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ucm.commands.store.lookup import described_prompt
from ucm.commands.store.stat import DIRECTORY_TIERS
from ucm.commands.store.text import many, say, say_json
from ucm.debug import block_keys
from ucm.store.base import StoreError
from ucm.store.factory import back_end_class, open_tier
from ucm.store.memory.segment import delete_blocks
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import unlink
from ucm.store.tier import ValueTier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig


def run(options: argparse.Namespace) -> int:
    """Delete, and print; 1 if a tier does not answer or cannot delete.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used.
    """
    settings, facts, token_ids = described_prompt(options)
    config = settings.store.as_store_config()
    dropped, failed = dict.fromkeys(config.parts, 0), dict[str, str]()
    for stored in facts.stored:
        size = stored.group.chunk_tokens
        keys = block_keys(facts, token_ids, size)[-(-options.from_token // size) :]
        for namespace in stored.ranks if keys else ():
            for name in config.parts:
                try:
                    dropped[name] += _drop(config, name, namespace, keys)
                except StoreError as error:
                    failed[name] = str(error).splitlines()[0]
    if options.json:
        say_json({"dropped": dropped, "failed": failed})
    else:
        say(
            f"{name}: {many(count, 'block', 'blocks')} deleted" for name, count in dropped.items() if name not in failed
        )
        say(f"{name}: {reason}" for name, reason in failed.items())
    return int(bool(failed))


def _drop(config: StoreConfig, name: str, namespace: str, keys: Sequence[BlockKey]) -> int:
    """Delete blocks from a tier; return how many there were.

    Raises:
        StoreError: The tier does not answer, or cannot delete.
    """
    if name == "Posix":
        return _unlink_all(Layout(root, namespace).block(key) for root in config.directories for key in keys)
    if name in DIRECTORY_TIERS:
        return delete_blocks(Layout(config.dram_directory, namespace), keys)
    back_end = back_end_class(name)
    if not (isinstance(back_end, type) and issubclass(back_end, ValueTier)):
        raise StoreError("this tier cannot delete single blocks")
    with closing(open_tier(config, name, namespace)) as tier:
        there = tier.contains(keys, tier.clock.monotonic() + tier.timeout)
        for key in keys:
            tier.remove(key, tier.clock.monotonic() + tier.timeout)  # type: ignore[attr-defined] # a ValueTier
    return there.count(True)


def _unlink_all(paths: Iterable[str]) -> int:
    """Delete files; return how many there were.

    Raises:
        StoreError: Some could not be deleted; the others were.
    """
    deleted, refused = 0, list[OSError]()
    for path in paths:
        try:
            unlink(path)
            deleted += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.append(error)
    if refused:
        raise StoreError(f"{many(deleted, 'block', 'blocks')} deleted, and {len(refused)} not: {refused[0]}")
    return deleted
