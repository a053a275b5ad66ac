"""``ucm store drop``: delete the blocks of a prompt from every tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ucm.commands.options import many, say, say_json
from ucm.commands.store.lookup import described_prompt
from ucm.debug import block_keys
from ucm.errors import ConfigError
from ucm.store.base import StoreError
from ucm.store.factory import back_end_class, is_tier, open_tier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

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
                except (ConfigError, StoreError) as error:
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
        ConfigError: The tier cannot be opened.
        StoreError: It does not answer, or cannot delete.
    """
    if not is_tier(back_end_class(name)):
        raise StoreError("this store cannot delete single blocks")
    with closing(open_tier(config, name, namespace)) as tier:
        return tier.drop(keys)
