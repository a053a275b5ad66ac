"""The subcommand ``ucm try``: test the stores of a deployment without its engine."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ucm.commands.options import add_deployment, at_least, quieten, say
from ucm.errors import UcmError

if TYPE_CHECKING:
    import argparse

    from ucm.store.base import BlockGeometry
    from ucm.store.config import StoreConfig

BLOCKS = 8
#: The time limit for a test block to reach every tier, in seconds.
FLUSH_SECONDS = 60.0


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "try",
        help="test a deployment's stores without an engine: save and load test blocks",
        description="Open the stores that an engine with these settings and this model would use, without starting "
        "the engine: show the namespace and the blocks, and save, load and compare test blocks.",
        epilog="Exit code: 0 every byte was loaded unchanged, 1 a block was lost or changed, 2 wrong usage.",
    )
    add_deployment(parser)
    more = f"test blocks per KV-cache group (default: {BLOCKS})"
    parser.add_argument("--blocks", type=at_least(1), default=BLOCKS, metavar="N", help=more)
    parser.set_defaults(handle=handle)


def handle(options: argparse.Namespace) -> int:
    """Test the stores, and print the results.

    Raises:
        UcmError: The settings or the model cannot be used, or the engine has several ranks.
    """
    quieten()
    from ucm.commands.store.prompt import describe  # noqa: PLC0415 - every ``ucm`` command imports this module

    settings, facts = describe(options.config, options.model, options.engine_args)
    if any(len(stored.ranks) > 1 or stored.group.slices for stored in facts.stored):
        raise UcmError(
            "it has several ranks, or stores slices of KV heads, and only whole blocks of one rank can be tried",
            where="tensor_parallel_size, or kv_head_shards",
            fix="leave them out: the store of each rank, or slice, works alike",
        )
    say(
        [
            f"connector    {settings.connector}",
            f"namespace    {facts.namespace}",
            f"device       {facts.device}",
            f"store        {settings.store.pipeline}",
        ]
    )
    failed = False
    for stored in facts.stored:
        group, geometry = stored.group, stored.geometry
        size = f"{group.chunk_tokens} tokens, {geometry.nbytes:,} bytes"
        say([f"group {group.index}      {group.stored_as} of {size}; {stored.namespace}"])
        problems, times = round_trip(settings.store.as_store_config(), geometry, options.blocks)
        total = options.blocks * geometry.nbytes
        rates = ", ".join(f"{what} in {s * 1e3:.2f} ms ({total / s / 1e9:.2f} GB/s)" for what, s in times.items())
        say([f"round trip   {options.blocks} blocks, {total:,} bytes: {'FAILED' if problems else 'intact'}, {rates}"])
        say(f"             {problem}" for problem in dict.fromkeys(problems))
        failed = failed or bool(problems)
    return int(failed)


def round_trip(config: StoreConfig, geometry: BlockGeometry, blocks: int) -> tuple[list[str], dict[str, float]]:
    """Save test blocks, load them into other memory, and compare every byte.

    The blocks have a namespace of their own. They are deleted afterwards, unless a third-party tier or store cannot
    delete.

    Args:
        config: The store.
        geometry: The geometry of a block.
        blocks: How many.

    Returns:
        What went wrong, which is nothing if every byte was loaded unchanged; and the seconds until the blocks were
        ``saved``, and ``loaded``.
    """
    from ucm.store.base import BlockKey, BlockTransfer  # noqa: PLC0415 - every ``ucm`` command imports this module
    from ucm.store.factory import open_store, remove_blocks  # noqa: PLC0415 - likewise

    namespace = f"ucm-try-{os.getpid()}-{os.urandom(4).hex()}/g0"
    keys = [BlockKey(os.urandom(32)) for _ in range(blocks)]
    content = os.urandom(blocks * geometry.nbytes)
    loaded = bytearray(len(content))
    saves, loads = (
        [BlockTransfer(key, [memory[geometry.nbytes * n :][: geometry.nbytes]]) for n, key in enumerate(keys)]
        for memory in (memoryview(content), memoryview(loaded))
    )
    try:
        with open_store(config, namespace, geometry) as store:
            began = time.perf_counter()
            failed = store.save(saves).wait().failed
            times = {"saved": time.perf_counter() - began}
            problems = [f"save: {reason}" for reason in failed.values()]
            if not store.flush(FLUSH_SECONDS):
                problems.append(f"save: not in every tier after {FLUSH_SECONDS:.0f} s")
            if not failed:
                began = time.perf_counter()
                result = store.load(loads).wait()
                times["loaded"] = time.perf_counter() - began
                problems += [f"load: {error}" for error in result.failed.values()]
                if not result.failed and loaded != content:
                    problems.append("load: the bytes are not those that were saved, and no checksum failed")
    finally:
        remove_blocks(config, namespace, keys)
    return problems, times
