"""Shared by all tests: fixed seeds, and a check that stand-ins accept the calls of what they replace."""

from __future__ import annotations

import gc
import pkgutil
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.stand_in import disagreement

# Syntax trees are millions of objects without garbage; scanning them again and again takes minutes.
gc.set_threshold(100_000, 20, 20)

# Neither random seeds nor a slow machine must decide whether a change lands; `nox -s fuzz` searches with new seeds.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=500, deadline=None)
settings.load_profile("fixed")

_NOTHING = object()
_set = pytest.MonkeyPatch.setattr


def _set_checked(
    patch: pytest.MonkeyPatch, target: Any, name: Any, value: Any = _NOTHING, raising: bool = True
) -> None:
    """``monkeypatch.setattr`` that refuses a stand-in whose signature does not accept the original's calls."""
    owner, attribute, stand_in = target, name, value
    if value is _NOTHING:
        path, _, attribute = target.rpartition(".")
        owner, stand_in = pkgutil.resolve_name(path), name
    if problem := disagreement(getattr(owner, attribute, None), stand_in):
        raise TypeError(problem)
    _set(patch, owner, attribute, stand_in, raising=raising)


pytest.MonkeyPatch.setattr = _set_checked  # type: ignore[method-assign,assignment]
