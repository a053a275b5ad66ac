"""``ucm store retain``, ``pin`` and ``unpin``: lease the blocks of a prompt, tier by tier, or end their leases."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.commands.options import many, say, say_json
from ucm.commands.store.prompt import given_prompt
from ucm.commands.store.text import iso
from ucm.config.settings import format_size
from ucm.errors import UcmError
from ucm.store.factory import back_end_class, is_tier, open_tier
from ucm.store.posix.space import pins_beyond

if TYPE_CHECKING:
    import argparse

    from ucm.commands.store.prompt import Prompt


def run(options: argparse.Namespace) -> int:
    """Lease, and print; 1 if no block is leased as asked, or a tier leases only some of its blocks so.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used, or the lease would be too long.
    """
    prompt, ends = given_prompt(options), options.ends
    data = unpin(prompt, options.from_token) if ends else lease(prompt, options.seconds, pin=options.pin)
    tiers, done = data["tiers"], "ended" if ends else "leased"
    if options.json:
        say_json(data)
    else:
        what = "no longer leased" if ends else f"{'pinned' if options.pin else 'retained'} until {data['until']}"
        for name, one in tiers.items():
            rest = "; the others are only retained" if not ends and options.pin and one[done] < one["blocks"] else ""
            of_all = many(one["blocks"], "stored block", "stored blocks")
            say([f"{name}: {one[done]:,} of {of_all} {what}{rest}"])
        say(
            f"{name}: {many(len(one['refused']), 'block', 'blocks')} cannot be leased by this user: {one['refused'][0]}"
            for name, one in tiers.items()
            if one["refused"]
        )
        say(f"{name}: no leases: what it evicts is decided elsewhere" for name in data["without"])
    # E.g. memory has no pins, but the disk has.
    whole = all(one[done] in (0, one["blocks"]) for one in tiers.values())
    return int(not whole or not any(one[done] for one in tiers.values()))


def lease(prompt: Prompt, seconds: float, *, pin: bool) -> dict[str, Any]:
    """Lease the blocks of a prompt; return what ``--json`` prints.

    Raises:
        UcmError: The lease would be too long, these pins would be beyond those that the prompt's salt may have, a tier
            cannot be opened, or the engine would not cache this prompt.
    """
    longest = prompt.config.lease_seconds
    if seconds > longest:
        raise UcmError(
            f"a lease of {seconds:g} seconds is too long: the longest has {longest:g}",
            where="the time",
            fix="shorten it, or raise store: lease_seconds for all engines",
        )
    until = SYSTEM.time() + seconds
    if pin:
        _check_room(prompt, until)
    return {"until": iso(until), **_by_tier(prompt, until, "leased", pin=pin)}


def _check_room(prompt: Prompt, until: float) -> None:
    """Refuse pins that an evictor would not keep.

    Raises:
        UcmError: The prompt's salt may not pin so much.
    """
    blocks = {namespace: keys for stored, keys in prompt.groups() for namespace in stored.ranks}
    beyond = pins_beyond(prompt.config, blocks, until) if "Posix" in prompt.config.parts else None
    if beyond is not None:
        whose = beyond.salt if beyond.account == beyond.salt else f"{beyond.salt}, with all salts without a weight,"
        most, held, added = map(format_size, (beyond.most, beyond.held, beyond.added))
        raise UcmError(
            f"{whose} may pin {most} beside what others have pinned; it has {held} pinned, and this adds {added}",
            where=beyond.root,
            fix="pin less, end other pins of this salt with `ucm store unpin`, or raise store: posix_capacity",
        )


def unpin(prompt: Prompt, from_token: int = 0) -> dict[str, Any]:
    """End the leases of the blocks of a prompt, except those that have one of its first tokens, as ``lease`` does.

    Raises:
        UcmError: A tier cannot be opened, or the engine would not cache this prompt.
    """
    return _by_tier(prompt, 0.0, "ended", from_token=from_token)


def _by_tier(prompt: Prompt, until: float, done: str, *, pin: bool = False, from_token: int = 0) -> dict[str, Any]:
    """Call ``Tier.lease`` for each tier that has leases; return its counts, and the names of the others."""
    config = prompt.config
    back_ends = {name: back_end_class(name) for name in config.parts}
    tiers: dict[str, dict[str, Any]] = {
        name: {"blocks": 0, done: 0, "refused": []} for name, one in back_ends.items() if is_tier(one) and one.leases
    }
    for stored, depths in prompt.depths(from_token):
        for name, counts in tiers.items():
            for namespace in stored.ranks:
                with closing(open_tier(config, name, namespace)) as tier:
                    found = tier.lease(depths, until, pinned=pin)
                counts["blocks"] += found.stored
                counts[done] += found.leased
                counts["refused"] += map(str, found.refused)
    return {"tiers": tiers, "without": [name for name in config.parts if name not in tiers]}
