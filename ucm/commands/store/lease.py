"""``ucm store retain`` and ``ucm store pin``: lease the blocks of a prompt, tier by tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.commands.options import many, say, say_json
from ucm.commands.store.prompt import given_prompt
from ucm.commands.store.text import iso
from ucm.errors import UcmError
from ucm.store.factory import back_end_class, is_tier, open_tier

if TYPE_CHECKING:
    import argparse

    from ucm.commands.store.prompt import Prompt


def run(options: argparse.Namespace) -> int:
    """Lease, and print; 1 if no block is leased as asked, or a tier leases only some of its blocks so.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used, or the lease would be too long.
    """
    data = lease(given_prompt(options), options.seconds, pin=options.pin)
    tiers = data["tiers"]
    if options.json:
        say_json(data)
    else:
        what = "pinned" if options.pin else "retained"
        for name, one in tiers.items():
            rest = "; the others are only retained" if options.pin and one["leased"] < one["blocks"] else ""
            of_all = many(one["blocks"], "stored block", "stored blocks")
            say([f"{name}: {one['leased']:,} of {of_all} {what} until {data['until']}{rest}"])
        say(
            f"{name}: {many(len(one['refused']), 'block', 'blocks')} cannot be leased by this user: {one['refused'][0]}"
            for name, one in tiers.items()
            if one["refused"]
        )
        say(f"{name}: no leases: what it evicts is decided elsewhere" for name in data["without"])
    # E.g. memory has no pins, but the disk has.
    whole = all(one["leased"] in (0, one["blocks"]) for one in tiers.values())
    return int(not whole or not any(one["leased"] for one in tiers.values()))


def lease(prompt: Prompt, seconds: float, *, pin: bool) -> dict[str, Any]:
    """Lease the blocks of a prompt; return what ``--json`` prints.

    Raises:
        UcmError: The lease would be too long, a tier cannot be opened, or the engine would not cache this prompt.
    """
    config = prompt.config
    if seconds > config.lease_seconds:
        raise UcmError(
            f"a lease of {seconds:g} seconds is too long: the longest has {config.lease_seconds:g}",
            where="the time",
            fix="shorten it, or raise store: lease_seconds for all engines",
        )
    until = SYSTEM.time() + seconds
    back_ends = {name: back_end_class(name) for name in config.parts}
    tiers: dict[str, dict[str, Any]] = {
        name: {"blocks": 0, "leased": 0, "refused": []}
        for name, one in back_ends.items()
        if is_tier(one) and one.leases
    }
    for stored, keys in prompt.groups():
        depths = {key: stored.group.depth(chunk) for chunk, key in enumerate(keys)}
        for name, counts in tiers.items():
            for namespace in stored.ranks:
                with closing(open_tier(config, name, namespace)) as tier:
                    done = tier.lease(depths, until, pinned=pin)
                counts["blocks"] += done.stored
                counts["leased"] += done.leased
                counts["refused"] += map(str, done.refused)
    return {"until": iso(until), "tiers": tiers, "without": [name for name in config.parts if name not in tiers]}
