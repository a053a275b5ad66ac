"""``ucm store drop``: delete the blocks of a prompt from every tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from ucm.commands.options import many, say, say_json
from ucm.commands.store.prompt import given_prompt
from ucm.errors import ConfigError
from ucm.store.base import StoreError
from ucm.store.factory import back_end_class, is_tier, open_tier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ucm.commands.store.prompt import Prompt
    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig


def run(options: argparse.Namespace) -> int:
    """Delete, and print; 1 if a tier does not answer or cannot delete.

    Raises:
        UcmError: The settings, the model or the prompt cannot be used.
    """
    data = drop(given_prompt(options), options.from_token)
    failed = data["failed"]
    if options.json:
        say_json(data)
    else:
        deleted = {name: count for name, count in data["dropped"].items() if name not in failed}
        say(f"{name}: {many(count, 'block', 'blocks')} deleted" for name, count in deleted.items())
        say(f"{name}: {reason}" for name, reason in failed.items())
    return int(bool(failed))


def drop(prompt: Prompt, from_token: int = 0) -> dict[str, Any]:
    """Delete the blocks of a prompt, except those that have one of its first tokens; return what ``--json`` prints.

    Raises:
        UcmError: The engine would not cache this prompt.
    """
    config = prompt.config
    dropped, failed = dict.fromkeys(config.parts, 0), dict[str, str]()
    for stored, meant in prompt.depths(from_token):
        for namespace in stored.ranks if meant else ():
            for name in config.parts:
                try:
                    dropped[name] += _drop(config, name, namespace, list(meant))
                except (ConfigError, StoreError) as error:
                    failed[name] = str(error).splitlines()[0]
    return {"dropped": dropped, "failed": failed}


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
