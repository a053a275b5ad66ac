"""The blocks of one prompt, for the commands that find, lease, move or delete them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.commands.options import quieten, read_prompt
from ucm.debug import block_keys, describe
from ucm.store.config import read_secret

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.weightless import EngineFacts, StoredGroup
    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what an engine would store of it.

    Args:
        settings: The engine's settings.
        facts: What the engine would name and store.
        token_ids: The prompt's tokens.
        salt: The ``cache_salt`` of its requests; empty for none.
    """

    settings: ConnectorConfig
    facts: EngineFacts
    token_ids: Sequence[int]
    salt: str = ""

    @property
    def config(self) -> StoreConfig:
        """The options of the store."""
        return self.settings.store.as_store_config()

    def groups(self) -> Iterator[tuple[StoredGroup, list[BlockKey]]]:
        """Yield each KV-cache group with the keys of the prompt's whole chunks, in order.

        Raises:
            UcmError: The engine would not cache this prompt.
        """
        for stored in self.facts.stored:
            yield stored, block_keys(self.facts, self.token_ids, stored.group.chunk_tokens, self.salt)

    def depths(self, from_token: int = 0) -> Iterator[tuple[StoredGroup, dict[BlockKey, int]]]:
        """Yield each KV-cache group with the depths of its chunks, except those that have one of the first tokens.

        Raises:
            UcmError: The engine would not cache this prompt.
        """
        for stored, keys in self.groups():
            first = -(-from_token // stored.group.chunk_tokens)
            yield stored, {key: stored.group.depth(chunk) for chunk, key in enumerate(keys[first:], first)}


def given_prompt(options: argparse.Namespace) -> Prompt:
    """Return the prompt of a command line.

    Raises:
        UcmError: The settings, the model, the prompt or the salt cannot be used.
    """
    quieten()
    salt = read_secret(options.salt_file, None, "--salt-file")
    token_ids = read_prompt(options) or []
    return Prompt(*describe(options.config, options.model, options.engine_args, of_all_ranks=True), token_ids, salt)
