"""Options are parsed strictly, an error names the wrong one, and a request's own settings are checked likewise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import Field, model_validator

from tests.ucm.sparse.told import told_meanwhile, warnings
from ucm.errors import ConfigError
from ucm.sparse.attention import asked_of
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.options import MOST_TOLD, MethodOptions, RequestOptions, parse_asked, parse_options, refuse_asked

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator


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


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        (None, None),
        (SimpleNamespace(), None),
        (SimpleNamespace(extra_args=None), None),
        (SimpleNamespace(extra_args={}), None),
        (SimpleNamespace(extra_args={"other": 1}), None),
        (SimpleNamespace(extra_args={"ucm_sparse": False}), False),
        (SimpleNamespace(extra_args={"ucm_sparse": {"token_budget": 3}}), {"token_budget": 3}),
    ],
)
def test_it_is_found_in_any_release(params: Any, asked: object) -> None:
    assert asked_of(params) == asked


@pytest.mark.parametrize("asked", [False, 0, "false", "0"])
def test_dense(asked: object) -> None:
    assert parse_asked(asked) is None


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        (None, None),
        (True, None),
        (1, None),
        ("true", None),
        ("null", None),
        ({}, None),
        ("{}", None),
        ({"token_budget": 512}, 512),
        ('{"token_budget": 512}', 512),
        ({"token_budget": None}, None),
    ],
)
def test_as_configured_or_with_a_budget(asked: object, budget: int | None) -> None:
    assert parse_asked(asked) == RequestOptions(token_budget=budget)


@pytest.mark.parametrize(
    ("asked", "where", "what"),
    [
        ("no", "extra_args.ucm_sparse: 'no'", "neither a boolean nor an object"),
        ("", "extra_args.ucm_sparse: ''", "neither"),
        (2, "extra_args.ucm_sparse: 2", "neither"),
        ([], "extra_args.ucm_sparse: []", "neither"),
        ("[" * 200, "extra_args.ucm_sparse: '[[", "neither"),
        ("[" * 100_000, "extra_args.ucm_sparse: '[[", "neither"),
        ({"budget": 5}, "extra_args.ucm_sparse.budget", "ucm_sparse has no option 'budget'"),
        ({3: 5}, "extra_args.ucm_sparse.3", "ucm_sparse has no option '3'"),
        ({"token_budget": 0}, "extra_args.ucm_sparse.token_budget: 0", "greater than or equal to 1"),
        ({"token_budget": "9"}, "extra_args.ucm_sparse.token_budget: '9'", "valid integer"),
        ({"token_budget": 1.5}, "extra_args.ucm_sparse.token_budget: 1.5", "valid integer"),
        ({"token_budget": True}, "extra_args.ucm_sparse.token_budget: True", "valid integer"),
        ('{"token_budget": -1}', "extra_args.ucm_sparse.token_budget: -1", "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_in_a_request_is_named(asked: object, where: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse_asked(asked)
    assert caught.value.where.startswith(where)
    assert len(caught.value.where) < 300
    assert caught.value.fix


def test_what_is_nested_without_end_is_only_wrong() -> None:
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    for asked in (deep, {"token_budget": deep}):
        with pytest.raises(ConfigError):
            parse_asked(asked)


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    with told_meanwhile() as records:
        yield records


def method(rank: int = 0) -> SparseMethod:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank))
    return SparseMethod(config, Role.WORKER, {})


def test_a_method_that_serves_all_alike_says_so_once(told: list[logging.LogRecord]) -> None:
    of = method()
    refuse_asked({"a": None, "b": True, "c": {}}, of)
    assert not warnings(told)
    refuse_asked(dict.fromkeys("abc", False), of)
    (line,) = warnings(told)
    assert line.startswith(
        "[UCM.Sparse] request a asks SparseMethod for options that cannot be honoured, so it runs like all others; "
        "further such requests are not logged.\nSparseMethod has no options for single requests\n"
        "  where: extra_args.ucm_sparse: False"
    )


def test_one_rank_says_it_for_all(told: list[logging.LogRecord]) -> None:
    refuse_asked({"a": False}, method(rank=1))
    assert not warnings(told)


def test_clients_do_not_fill_the_log(told: list[logging.LogRecord]) -> None:
    refuse_asked({f"{number}": f"value {number}" * 10_000 for number in range(2 * MOST_TOLD)}, method())
    assert len(warnings(told)) == MOST_TOLD
    assert all(len(line) < 1500 for line in warnings(told))
