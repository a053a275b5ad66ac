"""``ucm store retain`` and ``ucm store pin``: lease the blocks of a prompt, tier by tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.commands.options import many, say, say_json
from ucm.commands.store.lookup import described_prompt
from ucm.commands.store.text import iso
from ucm.debug import block_keys
from ucm.errors import UcmError
from ucm.store.factory import back_end_class, is_tier, open_tier

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    """Lease, and print; 1 if no block is leased as asked, or a tier leases only some of its blocks so.

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
    back_ends = {name: back_end_class(name) for name in config.parts}
    tiers = {name: [0, 0] for name, one in back_ends.items() if is_tier(one) and one.leases}  # stored, leased blocks
    refused: dict[str, list[OSError]] = {name: [] for name in tiers}
    for stored in facts.stored:
        keys = block_keys(facts, token_ids, stored.group.chunk_tokens)
        depths = {key: stored.group.depth(chunk) for chunk, key in enumerate(keys)}
        for name, counts in tiers.items():
            for namespace in stored.ranks:
                with closing(open_tier(config, name, namespace)) as tier:
                    done = tier.lease(depths, until, pinned=options.pin)
                counts[0] += done.stored
                counts[1] += done.leased
                refused[name] += done.refused
    without = [name for name in config.parts if name not in tiers]
    if options.json:
        counted = {name: {"blocks": there, "leased": leased} for name, (there, leased) in tiers.items()}
        say_json({"until": iso(until), "tiers": counted, "without": without})
    else:
        what = "pinned" if options.pin else "retained"
        for name, (there, leased) in tiers.items():
            rest = "; the others are only retained" if options.pin and leased < there else ""
            of_all = many(there, "stored block", "stored blocks")
            say([f"{name}: {leased:,} of {of_all} {what} until {iso(until)}{rest}"])
        say(
            f"{name}: {many(len(errors), 'block', 'blocks')} cannot be leased by this user: {errors[0]}"
            for name, errors in refused.items()
            if errors
        )
        say(f"{name}: no leases: what it evicts is decided elsewhere" for name in without)
    whole = all(leased in (0, there) for there, leased in tiers.values())  # e.g. memory has no pins, but the disk has
    return int(not whole or not any(leased for _, leased in tiers.values()))
