"""Write what a namespace's blocks depend on as a text beside them, so that operators see why two engines do not share.

The scheduler process writes it when it starts. The workers' stores remember the text that they find when they are
opened, and write it again when they recreate a namespace that was deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.logger import get_logger
from ucm.store.posix.layout import IDENTITY, Layout

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig


def write_identity(config: StoreConfig, namespace: str, text: str) -> None:
    """Write the text into each directory of our tiers unless it is there; log a directory that fails.

    Args:
        config: The store's configuration.
        namespace: The namespace that the text describes.
        text: JSON.
    """
    names = {name.strip() for name in config.pipeline.split("|")}
    roots = list(config.directories) if "Posix" in names else []
    if names & {"Dram", "Cache"}:
        roots.append(config.dram_directory)
    for root in roots:
        try:
            layout = Layout(root, namespace)
            layout.identity = text.encode()
            layout.make()
        except OSError as error:
            get_logger(__name__).warning("[UCM.Store] %s cannot be written below %s: %s", IDENTITY, root, error)
