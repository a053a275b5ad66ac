"""ReRoPE's settings, and what each that is wrong is told; no torch is needed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ucm.errors import ConfigError, SparseMethodError
from ucm.sparse.base import Role
from ucm.sparse.factory import method_class
from ucm.sparse.rerope import NEEDED, LeakyReRoPE, ReRoPE


def made(name: str, **options: Any) -> ReRoPE:
    nothing: Any = None
    found = method_class(name)(nothing, Role.WORKER, options)
    assert isinstance(found, ReRoPE)
    return found


def test_both_are_made_by_their_names() -> None:
    assert type(made("ReRoPE", window=128)) is ReRoPE
    assert type(made("LeakyReRoPE", window=128, leak=4)) is LeakyReRoPE
    assert made("ReRoPE", window=512, training_length=512).counts == {}


@pytest.mark.parametrize(
    ("name", "options", "place", "what", "fix"),
    [
        ("ReRoPE", {}, "ReRoPE.window: {}", "Field required", "a quarter of the trained length is usual"),
        ("ReRoPE", {"window": 0}, "ReRoPE.window: 0", "greater than or equal to 1", "1 or more"),
        ("ReRoPE", {"window": 8, "leak": 2.0}, "ReRoPE.leak", "has no option 'leak'", "There are window"),
        ("ReRoPE", {"window": 8, "training_length": 1}, "ReRoPE.training_length: 1", "greater than", "2 to 2147483647"),
        (
            "ReRoPE",
            {"window": 9, "training_length": 8},
            "ReRoPE: {",
            "beyond the training length",
            "the options are",
        ),
        ("LeakyReRoPE", {"window": 8}, "LeakyReRoPE.leak: {", "Field required", "a number above 1"),
        ("LeakyReRoPE", {"window": 8, "leak": 1}, "LeakyReRoPE.leak: 1", "greater than 1", "a number above 1"),
    ],
)
def test_what_is_wrong_is_named(name: str, options: dict[str, Any], place: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        made(name, **options)
    assert caught.value.where.startswith(f"ucm_sparse_config.{place}")
    assert fix in caught.value.fix


@pytest.mark.parametrize("group", NEEDED)
def test_it_does_not_run_without_its_hooks(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"UCM_DISABLE_{group}_PATCH", "1")
    with pytest.raises(SparseMethodError, match="hooks that are switched off"):
        made("ReRoPE", window=8)


def test_all_that_a_request_has_lasts_and_nothing_of_it_is_dense() -> None:
    """What a token's KV depends on is the tokens before it, but not as in an engine without the method."""
    for name, options in (("ReRoPE", {"window": 8}), ("LeakyReRoPE", {"window": 8, "leak": 2.0})):
        method = method_class(name)
        assert not method.prompts_are_dense(options)
        assert method.lasting_tokens(options, 10) == sys.maxsize
