"""Shared by all tests: fixed seeds, and a check that stand-ins accept the calls of what they replace."""

from __future__ import annotations

import fcntl
import gc
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.stand_in import disagreement

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

pytest_plugins = ["tests.not_judged", "tests.simulated"]

# Syntax trees are millions of objects without garbage; scanning them again and again takes minutes.
gc.set_threshold(100_000, 20, 20)

# A shell that starts the tests in the background lets them, and every program that they start, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Neither random seeds nor a slow machine must decide whether a change lands; `nox -s fuzz` searches with new seeds.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=500, deadline=None)
settings.load_profile("fixed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Let one of xdist's processes collect before the others: it compiles for all what has not been compiled.

    All of them import the same modules in the same order, and would each compile every one, which takes twice as long
    as all the rest of a collection.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with Path(__file__).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


_NOTHING = object()
_set, _set_item = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.setitem


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


def _set_item_checked(patch: pytest.MonkeyPatch, mapping: Mapping[Any, Any], name: Any, value: Any) -> None:
    """``monkeypatch.setitem`` with the same check, also of each function of a module in ``sys.modules``."""
    was = mapping.get(name)
    pairs = [(was, value)]
    if mapping is sys.modules and was is not None and value is not None:
        pairs += [(getattr(was, attribute, None), stand_in) for attribute, stand_in in vars(value).items()]
    for real, stand_in in pairs:
        if problem := disagreement(real, stand_in):
            raise TypeError(problem)
    _set_item(patch, mapping, name, value)


pytest.MonkeyPatch.setattr = _set_checked  # type: ignore[method-assign,assignment]
pytest.MonkeyPatch.setitem = _set_item_checked  # type: ignore[method-assign,assignment]
