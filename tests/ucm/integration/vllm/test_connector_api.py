"""UCM's connector class against the connector API of every release, read from the published sources."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.releases import REVIEWED
from tests.ucm.integration.vllm import published as vllm
from ucm import compat
from ucm.compat import ConnectorAbilities

ROOM = Path(__file__).parents[4] / "ucm/integration/vllm"
#: Modules that call a connector, at their paths in all releases.
CALLERS = (
    vllm.SCHEDULER,
    vllm.MIXIN,
    vllm.RUNNER,
    vllm.RUNNER_V2,
    vllm.CONNECTOR_V2,
    vllm.ENGINE,
    "vllm/v1/worker/gpu_worker.py",
    "vllm/attention/layer.py",
    "vllm/attention/utils/kv_transfer_utils.py",
    "vllm/model_executor/layers/attention/kv_transfer_utils.py",
    "vllm/distributed/kv_transfer/kv_transfer_state.py",
)
CONNECTOR = re.compile(r"(self\.|^)(kv_)?(connector|transfer_group)|get_kv_transfer_group\(\)|KVConnectorBase")


@functools.cache
def ours() -> dict[str, ast.FunctionDef]:
    """Return the methods of our class that vLLM calls."""
    tree = ast.parse((ROOM / "ucm_connector.py").read_text(encoding="utf-8"))
    connector = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "UCMConnector")
    methods = {node.name: node for node in connector.body if isinstance(node, ast.FunctionDef)}
    return {name: node for name, node in methods.items() if not name.startswith("_") or name == "__init__"}


def api(release: str) -> dict[str, ast.FunctionDef]:
    """Return the methods that a release lets a connector define."""
    marks = vllm.methods(release, vllm.BASE, "SupportsHMA")
    return {**marks, **vllm.methods(release, vllm.BASE, "KVConnectorBase_V1")}


def test_vllm_knows_each_of_our_methods() -> None:
    """A method that no release calls is misspelt or obsolete."""
    known = {name for release in REVIEWED for name in api(release)}
    assert ours().keys() <= known


@pytest.mark.parametrize("release", REVIEWED)
def test_which_releases_ask_again(release: str) -> None:
    base = type("Base", (), dict.fromkeys(api(release)))
    schedule = ast.unparse(vllm.methods(release, vllm.SCHEDULER, "Scheduler")["schedule"])
    assert ConnectorAbilities(base).asks_again == (
        "external_computed_tokens is None" in schedule or "ext_tokens is None" in schedule
    )


@pytest.mark.parametrize("release", REVIEWED)
def test_abstract_methods_are_implemented(release: str) -> None:
    abstract = {name for name, node in api(release).items() if "abstractmethod" in vllm.decorators(node)}
    assert abstract
    assert abstract <= ours().keys()


@pytest.mark.parametrize("release", REVIEWED)
def test_overridden_methods_take_what_vllms_take(release: str) -> None:
    theirs = api(release)
    for name in ours().keys() & theirs.keys() - {"__init__"}:
        mine, given = vllm.signature(ours()[name]), vllm.signature(theirs[name])
        kinds = {"property", "classmethod", "staticmethod"}
        assert vllm.decorators(ours()[name]) & kinds == vllm.decorators(theirs[name]) & kinds, name
        simple = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        mine.bind(*simple)
        mine.bind(*(p for p in simple if p.default is p.empty))
        if any(p.kind is p.VAR_KEYWORD for p in given.parameters.values()):
            mine.bind(*simple, a_later_argument=None)


@pytest.mark.parametrize("release", REVIEWED)
def test_every_call_of_a_connector_fits_our_methods(release: str) -> None:
    """Checked with the callers' actual positional and keyword arguments."""
    seen = set()
    for path in CALLERS:
        tree = vllm.module(release, path)
        for call in [] if tree is None else vllm.calls(tree, *ours()):
            receiver = ast.unparse(call.func).rpartition(".")[0]
            if not CONNECTOR.search(receiver) or "ec_connector" in receiver or "aux_output" in receiver:
                continue
            if any(isinstance(argument, ast.Starred) for argument in call.args):
                continue
            keywords = {word.arg: word.value for word in call.keywords if word.arg}
            vllm.signature(ours()[vllm.called(call)]).bind(*call.args, **keywords)
            seen.add(vllm.called(call))
    everywhere = {"get_num_new_matched_tokens", "build_connector_meta", "request_finished", "start_load_kv"}
    assert everywhere | {"bind_connector_metadata", "wait_for_save", "register_kv_caches"} <= seen


@pytest.mark.parametrize("release", REVIEWED)
def test_the_factory_constructs_ours(release: str) -> None:
    """With two arguments until 0.11.0, then with three, if the third one has the right name."""
    constructor = vllm.signature(ours()["__init__"])
    found = [
        call
        for name in ("create_connector_v1", "create_connector")
        for node in [vllm.methods(release, vllm.FACTORY, "KVConnectorFactory").get(name)]
        if node is not None
        for call in vllm.calls(node, "connector_cls")
    ]
    assert found
    for call in found:
        constructor.bind(*call.args)
    given = {len(call.args) for call in found}
    assert max(given) == (2 if REVIEWED.index(release) < REVIEWED.index("0.11.1") else 3)
    assert "kv_cache_config" in constructor.parameters


@pytest.mark.parametrize("release", REVIEWED)
def test_the_factory_takes_the_names_of_ours(release: str) -> None:
    assert "_registry" in vllm.fields(release, vllm.FACTORY, "KVConnectorFactory")
    vllm.signature(vllm.methods(release, vllm.FACTORY, "KVConnectorFactory")["register_connector"]).bind(*"123")


@pytest.mark.parametrize("release", REVIEWED)
def test_the_base_class_takes_what_we_hand_on(release: str) -> None:
    required = [p for p in vllm.signature(api(release)["__init__"]).parameters.values() if p.default is p.empty]
    gives = REVIEWED.index(release) >= REVIEWED.index("0.11.1")
    assert len(required) <= (3 if gives else 2)


@pytest.mark.parametrize(
    ("variable", "path", "name"),
    [("scheduler_output", vllm.OUTPUT, "SchedulerOutput"), ("request", vllm.REQUEST, "Request")],
)
@pytest.mark.parametrize("release", REVIEWED)
def test_what_we_read_without_a_fallback_is_there(release: str, variable: str, path: str, name: str) -> None:
    read = _read_of(variable)
    assert read
    assert read <= vllm.attributes(release, path, name)


@functools.cache
def _read_of(variable: str) -> frozenset[str]:
    """Return the attributes that the connector's modules read from variables of this name, or from a state's."""
    found: set[str] = set()
    for file in (ROOM / "connector").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.fullmatch(
                rf"(\w+\.)?{variable}", ast.unparse(node.value).replace("moves.", "")
            ):
                found.add(node.attr)
    # Hashes are only read of a request that has them, see `compat.block_hashes`.
    return frozenset(found - {"saves", "loads", "block_hashes"})


@pytest.mark.parametrize("release", REVIEWED)
def test_the_blocks_of_an_admission_are_read_in_the_releases_shape(release: str) -> None:
    node = vllm.function(release, "vllm/v1/core/kv_cache_manager.py", "KVCacheBlocks.get_block_ids")
    shape = ast.unparse(node.returns) if node.returns else ""
    ids: Any = [[4, 7]] if shape.startswith("list") else ([4, 7], [8])
    blocks = make_dataclass("KVCacheBlocks", [], namespace={"get_block_ids": lambda _: ids})()
    assert compat.block_ids_by_group(blocks) == [list(group) for group in ids]
    vllm.signature(node).bind()


@pytest.mark.parametrize("release", REVIEWED)
def test_grown_requests_are_read_in_the_releases_shape(release: str) -> None:
    """One with new blocks, one without, one that resumes with all of its blocks."""
    fields = vllm.fields(release, vllm.OUTPUT, "CachedRequestData")
    annotation = fields["new_block_ids"]
    several = "req_ids" in fields  # until 0.9.1 an object is one request
    blocks: Any = [[5, 6]] if annotation.removeprefix("list[" if several else "").startswith("list") else ([5, 6],)
    none: Any = None if "None" in annotation or "Optional" in annotation else type(blocks)([[]])
    ids, new, flags = ["grows", "stays", "resumes"], [blocks, none, blocks], [False, False, True]
    cached: Any
    if several:
        known = {"req_ids": ids, "new_block_ids": new, "resumed_from_preemption": flags, "resumed_req_ids": {"resumes"}}
        known["num_computed_tokens"] = [8, 8, 0]
        cached = make_dataclass("CachedRequestData", fields)(**{name: known.get(name) for name in fields})
    else:
        rows = [
            {"req_id": i, "new_block_ids": b, "resumed_from_preemption": f}
            for i, b, f in zip(ids, new, flags, strict=True)
        ]
        cached = [make_dataclass("CachedRequestData", fields)(**{n: row.get(n) for n in fields}) for row in rows]
    output = make_dataclass("SchedulerOutput", ["scheduled_cached_reqs"])(cached)
    grown = {name: ids for name, ids in compat.grown_requests(output) if any(ids)}
    assert grown == {"grows": [[5, 6]]}
