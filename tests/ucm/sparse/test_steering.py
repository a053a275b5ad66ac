"""The options of a request: parsed from the client's values, and logged once if they cannot be honoured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.sparse.told import told_meanwhile, warnings
from ucm.errors import ConfigError
from ucm.sparse.attention import asked_of
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.steering import MOST_TOLD, RequestOptions, parse_asked, refuse_asked

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator


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
def test_what_is_wrong_is_named(asked: object, where: str, what: str) -> None:
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
