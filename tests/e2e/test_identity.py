"""Engines with different blocks do not share them in one store."""

from __future__ import annotations

import json
import re
import shutil
import struct
from itertools import product
from typing import TYPE_CHECKING

import pytest

from tests.e2e.engine import FP8_NEEDS
from tests.e2e.prefix_workload import prompt, request

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.prefix_engine import Answer
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]


def test_engines_with_and_without_hybrid_groups_share_nothing(environments: Environments, tmp_path: Path) -> None:
    """Otherwise the second one would hit blocks of the first one that it cannot read."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_models import HYBRID, write_tiny_model  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    environment, store = environments.overlay, tmp_path / "store"
    engine = {"model": str(write_tiny_model(environment, "hybrid", HYBRID)), **connector(posix(store))}
    requests = [request(prompt(length, "geometry"), 8) for length in (97, 400)]
    answers: list[list[Answer]] = []
    namespaces = set()
    for name, more in {"hybrid": {}, "one group": {"disable_hybrid_kv_cache_manager": True}}.items():
        with PrefixEngine(environment, tmp_path / name, {**engine, **more}, IN_PROCESS) as started:
            answers.append([answer for one in requests for answer in started.generate([one])])
            started.settle()
        namespaces.update(re.findall(r"\[UCM.Connector\] namespace (\S+), (\d) stores? to look up", started.log))
    assert sorted(count for _, count in namespaces) == ["1", "3"]
    assert len({where for where, _ in namespaces}) == 2
    assert [answer.cached for answer in answers[1]] == [0, 0]
    assert [answer.tokens for answer in answers[1]] == [answer.tokens for answer in answers[0]]


def test_caches_of_other_dtypes_share_nothing(environments: Environments, tmp_path: Path) -> None:
    """Both kinds of eight bits have blocks of one size."""
    from tests.e2e.prefix_engine import EngineFailedError, PrefixEngine, connector, posix  # noqa: PLC0415 - see above
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    store, requests = tmp_path / "store", [request(prompt(length, "dtypes"), 8) for length in (300, 600)]
    answers: dict[str, list[Answer]] = {}
    for turn, dtype in product(("cold", "warm"), ("auto", "fp8_e5m2", "fp8_e4m3")):
        settings = {"kv_cache_dtype": dtype, **connector(posix(store))}
        try:
            with PrefixEngine(environments.overlay, tmp_path / f"{turn} {dtype}", settings, IN_PROCESS) as engine:
                found = engine.generate(requests)
                engine.settle()
        except EngineFailedError as error:
            if FP8_NEEDS in str(error):
                pytest.skip(f"this processor cannot store KV so: {FP8_NEEDS}")
            raise
        assert [bool(answer.cached) for answer in found] == [turn == "warm"] * 2
        before = answers.setdefault(dtype, found)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in before]


def other_weights(model: Path, directory: Path) -> Path:
    """Write a copy of a model with negated value projections."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    for name, tensor in header.items():
        if "v_proj" in name:
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            content[begin + 3 : end : 4] = bytes(byte ^ 0x80 for byte in content[begin + 3 : end : 4])
    path.write_bytes(content)
    return directory


def test_weights_that_change_in_place_start_anew(environments: Environments, tmp_path: Path) -> None:
    """Reloaded with a plain reset of vLLM's cache; then changed by hand, bypassing torch's version counter."""
    from tests.e2e.engine import MODEL  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.model import write_model  # noqa: PLC0415
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    environment, store = environments.overlay, tmp_path / "store"
    other = other_weights(write_model(MODEL), tmp_path / "other")
    wanted = [request(prompt(300, "in place"), 8)]
    with PrefixEngine(environment, tmp_path / "changing", connector(posix(store)), IN_PROCESS) as engine:
        (old,) = engine.generate(wanted)
        engine.settle()
        assert engine.reset()
        (again,) = engine.generate(wanted)
        engine.reload(other)
        assert engine.reset()
        (new,) = engine.generate(wanted)
        engine.settle()
        assert engine.reset()
        (kept,) = engine.generate(wanted)
        engine.scale("model.layers.1.input_layernorm.weight", -1.0)
        assert engine.reset()
        (scaled,) = engine.generate(wanted)
        log = engine.log
    model = {"model": str(other), **connector(posix(store))}
    with PrefixEngine(environment, tmp_path / "other engine", model, IN_PROCESS) as engine:
        (reference,) = engine.generate(wanted)
    assert (again.tokens, again.cached) == (old.tokens, 288)
    assert (new.tokens, new.cached) == (reference.tokens, 0)
    assert new.tokens != old.tokens
    assert scaled.cached == 0
    assert scaled.tokens != new.tokens
    assert log.count("the weights were changed in place") == 2
    assert kept.tokens == new.tokens
    assert reference.cached == 0
