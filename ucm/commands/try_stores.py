"""The subcommand ``ucm try``: test the stores of a deployment without its engine."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from ucm.commands.options import add_deployment, at_least, quieten, read_prompt, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ucm.debug import DebugConnector, Found, RoundTrip

LOOKUPS, LOADS, BLOCKS = 100, 10, 8
#: Blocks of the test prompt, which is looked up by default.
PROMPT_BLOCKS = 4


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "try",
        help="test a deployment's stores without an engine: look up a prompt, save and load test blocks",
        description="Open the stores that an engine with these settings and this model would use, without starting "
        "the engine: show the namespace and the tiers, look up a prompt, and save, load and compare test blocks.",
        epilog="Exit code: 0 every byte was loaded unchanged, 1 a block was lost or changed, 2 wrong usage.",
    )
    add_deployment(parser, prompt_required=False)
    more = f"test blocks per KV-cache group (default: {BLOCKS})"
    parser.add_argument("--blocks", type=at_least(1), default=BLOCKS, metavar="N", help=more)
    parser.set_defaults(handle=handle)


def handle(options: argparse.Namespace) -> int:
    """Test the stores, and print the results.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used.
    """
    quieten()
    from ucm.debug import open_connector  # noqa: PLC0415 - every ``ucm`` command imports this module

    with open_connector(options.config, options.model, engine_args=options.engine_args) as connector:
        say(_about(connector))
        token_ids = _prompt(options, connector)
        found = [connector.lookup(token_ids) for _ in range(LOOKUPS)]
        trips = connector.roundtrip(options.blocks, LOADS)
        say(_lookups(found, given=options.prompt is not None or options.tokens is not None))
        for trip in trips:
            say(_trip(trip))
    return int(any(trip.problems for trip in trips))


def _prompt(options: argparse.Namespace, connector: DebugConnector) -> list[int]:
    found = read_prompt(options)
    if found is not None:
        return found
    count = PROMPT_BLOCKS * max(stored.group.chunk_tokens for stored in connector.facts.stored)
    return [token % 100 for token in range(count + 1)]


def _about(connector: DebugConnector) -> list[str]:
    lines = [
        f"connector    {connector.settings.connector}",
        f"namespace    {connector.namespace}",
        f"device       {connector.facts.device}",
    ]
    lines += [
        f"group {stored.group.index}      {stored.group.stored_as} of {stored.group.chunk_tokens} tokens, "
        f"{stored.geometry.nbytes:,} bytes in {len(stored.geometry.slice_sizes)} pieces; {stored.namespace}"
        for stored in connector.facts.stored
    ]
    for name, stats in connector.tiers.items():
        used = "use unknown" if stats.used_bytes is None else f"{stats.used_bytes:,} bytes used"
        limit = "no limit" if stats.capacity_bytes is None else f"of {stats.capacity_bytes:,}"
        lines.append(f"tier         {name}: {used}, {limit}")
    return lines


def _lookups(found: Sequence[Found], *, given: bool) -> list[str]:
    last, seconds = found[-1], [one.seconds for one in found]
    prompt = "prompt" if given else "test prompt"
    lines = [f"lookup       {last.found_tokens} of {last.tokens} tokens of the {prompt} found: {last.hit_rate:.0%}"]
    if last.missing_key:
        lines.append(f"             first missing block {last.missing_key[:16]}…")
    lines.append(f"             {len(found)} lookups: {_times(seconds)}")
    return lines


def _trip(trip: RoundTrip) -> list[str]:
    lines = [
        f"round trip   group {trip.group}: {trip.blocks} blocks, {trip.nbytes:,} bytes: "
        + ("FAILED" if trip.problems else f"intact, from {', '.join(trip.tiers)}"),
        f"             saved in {trip.save_seconds * 1e3:.2f} ms ({trip.nbytes / trip.save_seconds / 1e9:.2f} GB/s)",
    ]
    if trip.load_seconds:
        rate = trip.nbytes / median(trip.load_seconds) / 1e9
        lines.append(f"             {len(trip.load_seconds)} loads: {_times(trip.load_seconds)} ({rate:.2f} GB/s)")
    return lines + [f"             {problem}" for problem in dict.fromkeys(trip.problems)]


def _times(seconds: Sequence[float]) -> str:
    return f"median {median(seconds) * 1e3:.3f} ms, slowest {max(seconds) * 1e3:.3f} ms"
