"""The kill switches, with which an operator turns off groups of rewritten modules.

``UCM_DISABLE_PATCHES=1`` turns everything off. ``UCM_DISABLE_<GROUP>_PATCH=1`` turns off one group, for instance
``UCM_DISABLE_ATTENTION_PATCH=1``, and with it every group whose rewritten modules rely on that one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALL = "UCM_DISABLE_PATCHES"
RUN_UPSTREAM = f"run upstream's vLLM, without UCM: set {ALL}=1"
VERBOSE = "UCM_PATCH_VERBOSE"
#: vLLM's variable that names the plug-ins that it loads; without it, it loads all.
PLUGINS = "VLLM_PLUGINS"
OFF = frozenset({"", "0", "false", "no", "off"})


def is_set(variable: str) -> bool:
    """Return whether a switch is on: set to anything but an empty string, 0, false, no or off."""
    return os.environ.get(variable, "").strip().lower() not in OFF


def variable_of(group: str) -> str:
    """Return the variable that turns a group off."""
    return f"UCM_DISABLE_{group.upper()}_PATCH"


def disabled_groups(needs: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the groups that are off, each with the reason.

    Args:
        needs: For each group, the groups that it relies on, possibly of another package's overlay.
    """
    if is_set(ALL):
        return dict.fromkeys(needs, f"{ALL} is set")
    known = dict.fromkeys([*needs, *(other for others in needs.values() for other in others)])
    off = {group: f"{variable_of(group)} is set" for group in known if is_set(variable_of(group))}
    changed = True
    while changed:
        changed = False
        for group, others in needs.items():
            cause = next((other for other in others if other in off), None)
            if group not in off and cause:
                off[group] = f"it relies on {cause}, which is off: {off[cause]}"
                changed = True
    return off
