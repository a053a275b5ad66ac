"""A method's options: errors name the place and the valid values."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field, model_validator

from ucm.errors import ConfigError
from ucm.sparse.options import MethodOptions, parse_options


class Example(MethodOptions):
    tokens: int = Field(64, ge=1, description="how many tokens are read, at least 1")
    ratio: float = Field(0.5, gt=0, le=1, description="a share, above 0 and at most 1")
    mode: str = "plain"
    kind: Literal["one way", "third way"] = Field("one way", description="of two")

    @model_validator(mode="after")
    def _fits(self) -> Example:
        if self.mode == "odd" and self.tokens % 2 == 0:
            raise ValueError("an odd mode needs odd tokens")
        return self


def test_defaults_and_what_is_given() -> None:
    assert parse_options(Example, "Example", {}) == Example(tokens=64, ratio=0.5, mode="plain", kind="one way")
    assert parse_options(Example, "Example", {"tokens": 7, "ratio": 1.0}).tokens == 7


@pytest.mark.parametrize(
    ("given", "place", "what", "fix"),
    [
        (
            {"budget": 7},
            "ucm_sparse_config.Example.budget",
            "Example has no option 'budget'",
            "There are tokens, ratio",
        ),
        ({"token": 7}, "ucm_sparse_config.Example.token", "has no option 'token'", "did you mean 'tokens'? There are"),
        ({"tokens": 0}, "ucm_sparse_config.Example.tokens: 0", "greater than or equal to 1", "at least 1"),
        ({"tokens": "7"}, "ucm_sparse_config.Example.tokens: '7'", "valid integer", "tokens: how many tokens"),
        ({"tokens": True}, "ucm_sparse_config.Example.tokens: True", "valid integer", "at least 1"),
        ({"ratio": 1.5}, "ucm_sparse_config.Example.ratio: 1.5", "less than or equal to 1", "a share"),
        ({"mode": 3}, "ucm_sparse_config.Example.mode: 3", "valid string", "the options are tokens, ratio, mode, kind"),
        ({"mode": "odd"}, "ucm_sparse_config.Example: {'mode': 'odd'}", "an odd mode needs odd tokens", "the options"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], place: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse_options(Example, "Example", given)
    assert caught.value.where == place
    assert fix in caught.value.fix


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(Example, "Example", {"token": 7, "ratio": 3.0, "mode": 3, "kind": "third"})
    text = str(caught.value)
    assert text.startswith("4 settings cannot be used\n1. ")
    for line in (
        "Example has no option 'token'\n  where: ucm_sparse_config.Example.token\n  to do: did you mean 'tokens'?",
        "Input should be less than or equal to 1\n  where: ucm_sparse_config.Example.ratio: 3.0\n",
        "  where: ucm_sparse_config.Example.mode: 3\n",
        "  where: ucm_sparse_config.Example.kind: 'third'\n  to do: did you mean 'third way'? kind: of two",
    ):
        assert line in text


def test_options_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_options(Example, "Example", {}).tokens = 3
