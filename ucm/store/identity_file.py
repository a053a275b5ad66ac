"""What a namespace's blocks depend on, as a text beside them, for operators: it tells why two engines do not share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.logger import get_logger
from ucm.store.inventory import IDENTITY
from ucm.store.posix_layout import FILE_MODE, Layout, owner_name

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig


def write_identity(config: StoreConfig, namespace: str, text: str) -> None:
    """Write the text into each directory of our tiers, unless it is there; a directory that fails is told.

    Args:
        config: Of the store.
        namespace: Whose blocks it is about.
        text: JSON.
    """
    names = {name.strip() for name in config.pipeline.split("|")}
    roots = list(config.directories) if "Posix" in names else []
    if names & {"Dram", "Cache"}:
        roots.append(config.dram_directory)
    for root in roots:
        try:
            _write(Layout(root, namespace), text)
        except OSError as error:
            get_logger().warning("[UCM.Store] %s cannot be written below %s: %s", IDENTITY, root, error)


def _write(layout: Layout, text: str) -> None:
    place = Path(layout.base, IDENTITY)
    if place.exists():
        return
    layout.make()
    private = f"{layout.temporary}/{owner_name()}"
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(private).rename(place)
