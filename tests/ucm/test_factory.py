"""Finding a sparse method by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ucm.errors import ConfigError
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.factory import METHODS, method_class
from ucm.sparse.probe import Probe
from ucm.sparse.topk.method import BlockTopK

if TYPE_CHECKING:
    from pathlib import Path


#: A configuration that no constructor here looks at.
NOTHING: Any = None


class Own(SparseMethod):
    pass


def test_a_method_that_comes_with_ucm(tmp_path: Path) -> None:
    assert type(method_class("Probe")(NOTHING, Role.WORKER, {"report_dir": str(tmp_path)})) is Probe


def test_a_method_of_ones_own() -> None:
    options = {"ratio": 0.3}
    config: Any = object()
    method = method_class(f"{__name__}:Own")(config, Role.SCHEDULER, options)
    assert type(method) is Own
    assert method.vllm_config is config
    assert method.role is Role.SCHEDULER
    assert method.options is options


def test_every_name_leads_to_a_method(tmp_path: Path) -> None:
    needed: dict[str, dict[str, Any]] = {
        "Probe": {"report_dir": str(tmp_path)},
        "ReRoPE": {"window": 128},
        "LeakyReRoPE": {"window": 128, "leak": 8},
    }
    for name in METHODS:
        assert isinstance(method_class(name)(NOTHING, Role.WORKER, needed.get(name, {})), SparseMethod)


def test_the_names_of_one_method() -> None:
    assert isinstance(method_class("GSAOnDevice")(NOTHING, Role.WORKER, {}), BlockTopK)
    assert METHODS["StreamingLLM"] == METHODS["SinkWindow"]


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="there is no sparse method 'Prob'") as caught:
        method_class("Prob")
    assert "Probe" not in caught.value.fix, "it only counts, for the doctor and for tests"
    with pytest.raises(ConfigError, match="there is no sparse method 'BlokTopK'") as caught:
        method_class("BlokTopK")
    assert caught.value.fix.startswith("did you mean 'BlockTopK'? Name one of BlockRetrieval, ")


def test_a_name_that_is_like_no_other() -> None:
    with pytest.raises(ConfigError, match="there is no sparse method 'xyz'") as caught:
        method_class("xyz")
    assert caught.value.fix.startswith("Name one of BlockRetrieval, ")


@pytest.mark.parametrize("name", ["ucm.no_such_module:Method", "ucm.sparse.base:NoSuchClass"])
def test_a_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        method_class(name)
    assert repr(name) in caught.value.what
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["ucm.sparse.base:Role", "ucm.sparse.factory:METHODS"])
def test_what_is_no_method(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a sparse method"):
        method_class(name)
