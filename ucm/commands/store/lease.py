"""``ucm store retain`` and ``ucm store pin``: lease the blocks of a prompt, tier by tier."""

from __future__ import annotations

from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.commands.store.lookup import described_prompt
from ucm.commands.store.stat import DIRECTORY_TIERS
from ucm.commands.store.text import iso, many, say, say_json
from ucm.debug import block_keys
from ucm.errors import UcmError
from ucm.store.factory import open_tier
from ucm.store.posix.layout import Layout
from ucm.store.posix.leases import LeaseRules, pinned_until
from ucm.store.posix.paths import touch
from ucm.store.tier import kept_until

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig

#: How often a file is tried that another process holds, which it does for microseconds, and the seconds in between.
_TRIES, _TRY_SECONDS = 20, 0.005


def run(options: argparse.Namespace) -> int:
    """Lease, and print; 1 if no block is stored, or one could not be leased as asked.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used, or the lease would be too long.
    """
    settings, facts, token_ids = described_prompt(options)
    config = settings.store.as_store_config()
    if options.seconds > config.lease_seconds:
        raise UcmError(
            f"a lease of {options.seconds:g} seconds is too long: the longest has {config.lease_seconds:g}",
            where="--for",
            fix="shorten it, or raise store: lease_seconds for all engines",
        )
    until = SYSTEM.time() + options.seconds
    tiers = {name: [0, 0] for name in config.parts if name in DIRECTORY_TIERS}  # stored and leased blocks
    refused: list[OSError] = []
    for stored in facts.stored:
        keys = block_keys(facts, token_ids, stored.group.chunk_tokens)
        for name, counts in tiers.items():
            lease = partial(_lease_files, refused) if name == "Posix" else partial(_lease_in_memory, name)
            for namespace in stored.ranks:
                there, leased = lease(config, namespace, keys, until, pin=options.pin)
                counts[0] += there
                counts[1] += leased
    without = [name for name in config.parts if name not in tiers]
    if options.json:
        counted = {name: {"blocks": there, "leased": leased} for name, (there, leased) in tiers.items()}
        say_json({"until": iso(until), "tiers": counted, "without": without})
    else:
        what = "pinned" if options.pin else "retained"
        for name, (there, leased) in tiers.items():
            say([f"{name}: {leased:,} of {many(there, 'stored block', 'stored blocks')} {what} until {iso(until)}"])
        if refused:
            say([f"Posix: {many(len(refused), 'block', 'blocks')} cannot be leased by this user: {refused[0]}"])
        say(f"{name}: no leases: what it evicts is decided elsewhere" for name in without)
    whole = all(there == leased for there, leased in tiers.values())
    return int(not whole or not any(there for there, _ in tiers.values()))


def _lease_files(
    refused: list[OSError],
    config: StoreConfig,
    namespace: str,
    keys: Sequence[BlockKey],
    until: float,
    *,
    pin: bool,
) -> tuple[int, int]:
    """Lease the blocks of a namespace on disk; return how many there are, and how many are leased as asked.

    What the system says of blocks that cannot be leased, for instance because another user owns them, is added to
    ``refused``.
    """
    rules, now = LeaseRules.of(config), int(SYSTEM.time() * 1e9)
    there = leased = 0
    for root in config.directories:
        layout = Layout(root, namespace)
        for depth, key in enumerate(keys):
            stamp = kept_until(until, depth)
            change = partial(rules.joined, new=pinned_until(stamp) if pin else stamp, now=now)
            try:
                kept = _touch(layout.block(key), change)
            except FileNotFoundError:
                continue
            except OSError as error:
                there += 1
                refused.append(error)
            else:
                there += 1
                leased += rules.is_pinned(kept, now) or not pin
    return there, leased


def _touch(path: str, change: Callable[[int], int]) -> int:
    """Call `touch`, again if an engine touches the file at this moment."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            return touch(path, change)
        SYSTEM.sleep(_TRY_SECONDS)
    return touch(path, change)


def _lease_in_memory(
    name: str, config: StoreConfig, namespace: str, keys: Sequence[BlockKey], until: float, *, pin: bool
) -> tuple[int, int]:
    """Retain the blocks of a namespace in shared memory, which has no pins; see ``_lease_files``."""
    del pin
    with closing(open_tier(config, name, namespace)) as tier:
        there = tier.contains(keys, tier.clock.monotonic() + tier.timeout)
        tier.retain(keys, until)
    return there.count(True), there.count(True)
