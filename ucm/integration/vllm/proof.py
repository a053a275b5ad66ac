"""Check, when a feature starts, that its hooks exist and are still the overlay's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.errors import SparseMethodError
from ucm.overlay.activation import check_feature

if TYPE_CHECKING:
    from collections.abc import Iterable


def require_hooked(name: str, groups: Iterable[str], owner: Any) -> None:
    """Refuse a method whose hooks another package has replaced in this process.

    Args:
        name: The method's name.
        groups: The groups of rewritten modules that it needs, as their switches name them.
        owner: vLLM's object that starts the method; a derived class may override hooked functions.

    Raises:
        SparseMethodError: Naming each replaced function, and its replacement.
        InactiveOverlayError: If the overlay is inactive, or another finder takes its modules.
    """
    found = check_feature([group.lower() for group in groups], type(owner))
    if found:
        raise SparseMethodError(
            f"{name} needs hooks that another package has taken out",
            where="; ".join(map(str, found)),
            fix="do without that package or its feature, install an overlay that covers it, or serve without "
            "ucm_sparse_config",
        )
