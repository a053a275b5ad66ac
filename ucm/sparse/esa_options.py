"""What an operator may set of `ESA`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ucm.config.store_settings import StoreSettings
from ucm.sparse.options import MethodOptions
from ucm.sparse.window import TILE, SinksAndWindow
from ucm.store.config import default_dram_directory


def default_store() -> StoreSettings:
    """Shared memory, in a directory apart from the prefix cache's: one does not evict the other's blocks."""
    return StoreSettings(pipeline="Dram", dram_directory=f"{default_dram_directory()}-middle")


class ESAOptions(MethodOptions):
    """What an operator may set.

    Attributes:
        token_budget: Tokens between the sinks and the window that a step reads of a request in a layer, in whole
            blocks: what a request holds in vLLM's memory beyond sinks, window and the tokens of the steps under way.
        sink_tokens: Tokens from the start of a request that are always read; rounded up to whole blocks.
        window_tokens: Tokens before the newest that are always read.
        retrieval: ``exact``: each step reads what its own query wants, and waits for what is not there. ``ahead``: it
            reads what the query of the step before wanted, which is brought while the model runs.
        store: Where the middle is kept; as the connector's ``store`` section. By default the Dram tier.
    """

    beside_kv = frozenset({"store"})
    token_budget: int = Field(default=2048, ge=1, description="a number of tokens, 1 or more")
    sink_tokens: int = Field(default=4, ge=0, description="a number of tokens, 0 or more")
    window_tokens: int = Field(default=1024, ge=1, description="a number of tokens, 1 or more")
    retrieval: Literal["exact", "ahead"] = Field(default="exact", description="`exact` or `ahead`")
    store: StoreSettings = Field(default_factory=default_store, description="a `store` section, as the connector's")

    @field_validator("store", mode="before")
    @classmethod
    def _section(cls, value: object) -> object:
        return StoreSettings.model_validate(value) if isinstance(value, dict) else value

    def window(self, tile: int = TILE) -> SinksAndWindow:
        """What is always read."""
        return SinksAndWindow(self.sink_tokens, self.window_tokens, tile=tile)
