"""Check that no kill switch removes the hooks that a method needs, which would leave the engine silently dense."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Values with which a switch counts as unset.
OFF = frozenset({"", "0", "false", "no", "off"})


def require_hooks(name: str, groups: Iterable[str]) -> None:
    """Refuse to run a method without its hooks.

    Args:
        name: The method's name.
        groups: Groups of rewritten modules, as their switches name them: ``ATTENTION``, ``WORKER``, ….

    Raises:
        SparseMethodError: Naming the first switch that is set.
    """
    for group in groups:
        variable = f"UCM_DISABLE_{group}_PATCH"
        if os.environ.get(variable, "").strip().lower() not in OFF:
            raise SparseMethodError(
                f"{name} needs hooks that are switched off",
                where=f"the environment variable {variable}",
                fix="unset it, or serve without ucm_sparse_config",
            )
