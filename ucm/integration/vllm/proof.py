"""What a feature asks of the overlay when it starts: that its hooks are there, and still the overlay's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.errors import SparseMethodError
from ucm.overlay.activation import check_feature

if TYPE_CHECKING:
    from collections.abc import Iterable


def require_hooked(name: str, groups: Iterable[str], owner: Any) -> None:
    """Refuse a method whose hooks another package has replaced, in this process, since vLLM was loaded.

    Args:
        name: The method's.
        groups: The groups of rewritten modules that it needs, as their switches name them.
        owner: vLLM's object that starts it: a derived class may replace what it inherits.

    Raises:
        SparseMethodError: Naming each function that was replaced, and by whom.
        InactiveOverlayError: If the overlay does not act, or another finder takes its place.
    """
    found = check_feature([group.lower() for group in groups], type(owner))
    if found:
        raise SparseMethodError(
            f"{name} needs hooks that another package has taken out",
            where="; ".join(map(str, found)),
            fix="do without that package or its feature, install an overlay that covers it, or serve without "
            "ucm_sparse_config",
        )
