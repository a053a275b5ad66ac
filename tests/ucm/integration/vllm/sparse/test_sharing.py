"""KV under a sparse method is found by its own block hashes alone, and connectors with other keys are refused."""

from __future__ import annotations

import ast
import hashlib
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from tests.releases import ASCEND, REVIEWED
from tests.transforms.upstream import sources
from transforms.ascend.registry import VLLM_ASCEND
from ucm import compat
from ucm.errors import ConfigError, SparseMethodError
from ucm.integration.vllm import handshake, hooks
from ucm.integration.vllm.sparse import sharing
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.overlay.manifest import DEFAULT_SEAM
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[5]
VLLM = "vllm.distributed.kv_transfer.kv_connector.v1."
FILES = VLLM.replace(".", "/")
#: Methods that change what the blocks of a prompt hold, and those that leave prompts or everything alone.
CHANGING: list[dict[str, Any]] = [
    {"ReRoPE": {"window": 128}},
    {"ReRoPE": {"window": 64}},
    {"ReRoPE": {"window": 64, "training_length": 512}},
    {"LeakyReRoPE": {"window": 64, "leak": 4.0}},
    {"SinkWindow": {}},
    {"SinkWindow": {"window_tokens": 64}},
    {"ucm.sparse.base:SparseMethod": {}},  # one of others, of which nothing is known
]
DENSE_PROMPTS: list[dict[str, Any]] = [
    {"BlockTopK": {}},
    {"GSAOnDevice": {"token_budget": 256}},
    {"SinkWindow": {"prefill": "dense"}},
    {"ESA": {}},
]
ALONE: list[dict[str, Any]] = [
    {},
    {"Probe": {"report_dir": "unused"}},
]
#: The release that brought each connector, and where its other modules are.
FIRST = {
    "MooncakeStoreConnector": "0.21.0",
    "OffloadingConnector": "0.11.0",
    "SimpleCPUOffloadConnector": "0.19.1",
    "UMBPStoreConnector": "0.33.0",
}
PARTS = {
    "MooncakeStoreConnector": f"{FILES}mooncake/store/",
    "OffloadingConnector": f"{FILES}offloading/",
    "SimpleCPUOffloadConnector": "vllm/v1/simple_kv_offload/",
    "UMBPStoreConnector": f"{FILES}umbp/",
}
#: What a module hashes beside tokens: the settings of the engine, for the name of its namespace.
HASHES_SETTINGS = {f"{FILES}umbp/data.py"}
BLOCK = (b"parent", (1, 2, 3), None)


def engine(method: dict[str, Any], *, connector: bool = False, **additional: Any) -> Any:
    return SimpleNamespace(
        additional_config={"ucm_sparse_config": method, **additional},
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}) if connector else None,
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=True),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def sha256(content: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(content)).digest()


def chain(hash_function: Callable[[Any], Any], blocks: int = 3) -> list[bytes]:
    """Return the hashes of some blocks, as vLLM chains them."""
    hashes = [b"none"]
    for number in range(blocks):
        hashes.append(hash_function((hashes[-1], tuple(range(16 * number, 16 * number + 16)), None)))
    return hashes[1:]


def named(path: str, **attributes: Any) -> Any:
    """Return an object of a class ``module:Class``."""
    module, _, name = path.partition(":")
    return type(name, (), {"__module__": module, **attributes})()


def method_of(config: Any) -> SparseMethod:
    """Return a configured method's instance, without its constructor, which looks for an overlay."""
    found = sparse_method_config(config)
    assert found is not None
    name, options = found
    method = object.__new__(method_class(name))
    SparseMethod.__init__(method, config, Role.SCHEDULER, options)
    return method


# Block hashes.


def test_each_setting_has_hashes_of_its_own() -> None:
    found = [chain(hooks.block_hash_function(engine(method), sha256)) for method in CHANGING]
    dense = chain(hooks.block_hash_function(engine({}), sha256))
    assert len({hash_ for of in [*found, dense] for hash_ in of}) == 3 * (len(CHANGING) + 1)


@pytest.mark.parametrize("method", [*DENSE_PROMPTS, *ALONE], ids=str)
def test_a_method_that_leaves_prompts_alone_leaves_the_function_alone(method: dict[str, Any]) -> None:
    assert hooks.block_hash_function(engine(method), sha256) is sha256


def test_equal_settings_have_equal_hashes_in_any_process_and_writing() -> None:
    written: list[dict[str, Any]] = [
        {"ReRoPE": {"window": 64, "training_length": 512}},
        {"ReRoPE": {"training_length": 512, "window": 64}},
        {"ucm.sparse.rerope:ReRoPE": {"window": 64, "training_length": 512}},
    ]
    assert len({sharing.block_hash_seed(engine(method)) for method in written}) == 1
    code = (
        "from tests.ucm.integration.vllm.sparse import test_sharing as t\n"
        f"print(t.sharing.block_hash_seed(t.engine({written[0]!r})).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {sharing.block_hash_seed(engine(written[0])).hex()}


def test_what_shapes_no_kv_changes_no_hash(tmp_path: Path) -> None:
    stores = [{"ESA": {"store": {"pipeline": "Posix", "directories": [str(tmp_path / of)]}}} for of in "ab"]
    assert len({sharing.block_hash_seed(engine(method)) for method in stores}) == 1


def test_a_method_with_dense_prompts_has_its_own_hashes_where_requests_have_no_hashers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, the blocks of answers cannot be named apart (0.9.0 to 0.10.0)."""
    monkeypatch.setattr(sharing, "requests_have_hashers", lambda: False)
    assert hooks.block_hash_function(engine({"BlockTopK": {}}), sha256)(BLOCK) != sha256(BLOCK)


def test_the_function_keeps_its_name_and_several_engines_of_a_process_their_own() -> None:
    one, other = (hooks.block_hash_function(engine({"ReRoPE": {"window": of}}), sha256) for of in (64, 128))
    assert one(BLOCK) != other(BLOCK) != sha256(BLOCK)
    assert one.__name__ == "sha256"


def test_builtin_hashes_are_seeded_too() -> None:
    found = hooks.block_hash_function(engine({"ReRoPE": {"window": 64}}), hash)
    assert found(BLOCK) == found(BLOCK) != hash(BLOCK)


def test_in_older_releases_the_managers_get_the_function() -> None:
    """Up to 0.10.0 the scheduler's managers hash blocks: the same function for lookups and for new blocks."""
    for shape in ("single_type_manager", "coordinator"):
        single = SimpleNamespace(caching_hash_fn=sha256)
        inner = single if shape == "single_type_manager" else SimpleNamespace(single_type_managers=(single,))
        manager = SimpleNamespace(caching_hash_fn=sha256, **{shape: inner})
        config = engine({"ucm.sparse.base:SparseMethod": {}})
        hooks.scheduler_init(SimpleNamespace(vllm_config=config, kv_cache_manager=manager, connector=None))
        assert manager.caching_hash_fn(BLOCK) == single.caching_hash_fn(BLOCK) != sha256(BLOCK)


# Connectors.

BY_HASH = [named(path) for path in sorted(sharing.BY_BLOCK_HASH)]
EXAMPLES = [named(path) for path in sorted(sharing.PROMPTS_ALONE)]
OURS = named("ucm.integration.vllm.ucm_connector:UCMConnector")
OTHERS = [
    named(f"{VLLM}nixl.connector:NixlPullConnector"),
    named(f"{VLLM}lmcache_connector:LMCacheConnectorV1"),
    named(f"{VLLM}lmcache_mp_connector:LMCacheMPConnector"),
    named(f"{VLLM}mooncake.mooncake_connector:MooncakeConnector"),
    named(f"{VLLM}hf3fs.hf3fs_connector:HF3FSKVConnector"),
    named("acme.kv:TheirConnector"),
    named("acme.kv:OffloadingConnector"),  # another one of a known name
    named("acme.kv:MultiConnector", _connectors=[OURS]),
]


def within(*connectors: Any) -> Any:
    return named(f"{VLLM}multi_connector:MultiConnector", _connectors=list(connectors))


def refused(method: Mapping[str, Any], connector: Any, **additional: Any) -> str:
    """Return the refusal of a connector beside a method; empty if it is accepted."""
    try:
        sharing.require_connectors(method_of(engine(dict(method), **additional)), connector)
    except SparseMethodError as error:
        return str(error)
    return ""


REROPE = {"ReRoPE": {"window": 128}}


@pytest.mark.parametrize("connector", [None, OURS, within(OURS), *BY_HASH, within(OURS, within(BY_HASH[0]))])
def test_connectors_by_block_hashes_are_served(connector: Any) -> None:
    assert not refused(REROPE, connector)
    assert not refused({"BlockTopK": {}}, connector)


@pytest.mark.parametrize("connector", [*EXAMPLES, *OTHERS], ids=lambda of: type(of).__name__)
def test_others_are_refused_by_name(connector: Any) -> None:
    name = type(connector).__name__
    for one in (connector, within(OURS, connector), within(OURS, within(BY_HASH[0], connector))):
        told = refused(REROPE, one)
        assert f"ReRoPE changes the KV of the tokens that it computes, and {name} does not find KV by vLLM's" in told
        assert f"kv_transfer_config: {name} ({type(connector).__module__})" in told
        assert f'"ucm_trusted_connectors": ["{name}"]' in told


@pytest.mark.parametrize("method", CHANGING, ids=str)
def test_beside_every_method_that_changes_prompts(method: dict[str, Any]) -> None:
    assert refused(method, EXAMPLES[0])


@pytest.mark.parametrize("method", DENSE_PROMPTS[:2], ids=str)
def test_with_dense_prompts_those_that_keep_prompts_alone_are_served(method: dict[str, Any]) -> None:
    """The blocks of answers have hashes of their own, but another key of their tokens would not tell them apart."""
    assert not any(refused(method, one) for one in (*EXAMPLES, within(OURS, *EXAMPLES)))
    assert all(refused(method, one) for one in OTHERS)


@pytest.mark.parametrize("method", ALONE[1:], ids=str)
def test_beside_a_method_that_changes_nothing_all_are_served(method: dict[str, Any]) -> None:
    assert not any(refused(method, one) for one in (*EXAMPLES, *OTHERS))


@pytest.mark.parametrize("method", [{"SinkWindow": {}}, {"SinkWindow": {"prefill": "dense"}}, {"ESA": {}}], ids=str)
def test_beside_a_method_that_frees_blocks_only_ours_is_served(method: dict[str, Any]) -> None:
    assert not refused(method, None)
    assert not refused(method, OURS)
    for one in (*BY_HASH, *EXAMPLES, *OTHERS, within(OURS)):
        told = refused(method, one, ucm_trusted_connectors=[type(one).__name__])
        assert "another KV connector than UCM's may still need blocks that" in told
        assert type(one).__name__ in told


def test_an_operator_can_vouch_for_a_connector_by_name() -> None:
    theirs = OTHERS[-3]
    assert not refused(REROPE, within(OURS, theirs), ucm_trusted_connectors=["TheirConnector"])
    assert "NixlPullConnector" in refused(REROPE, within(theirs, OTHERS[0]), ucm_trusted_connectors=["TheirConnector"])


@pytest.mark.parametrize("trusted", ["NixlConnector", [1], {"NixlConnector": True}, None])
def test_what_is_no_list_of_names_is_refused(trusted: Any) -> None:
    with pytest.raises(ConfigError, match="trusted connectors are not a list of names"):
        refused(REROPE, OTHERS[0], ucm_trusted_connectors=trusted)


def test_vouching_goes_beside_a_method_in_a_connectors_settings() -> None:
    config = engine({})
    config.additional_config = {"ucm_trusted_connectors": ["TheirConnector"]}
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"ucm_sparse_config": REROPE})
    assert sparse_method_config(config) == ("ReRoPE", REROPE["ReRoPE"])
    assert sharing.trusted_connectors(config) == {"TheirConnector"}


def test_a_scheduler_with_such_a_connector_does_not_start() -> None:
    scheduler = SimpleNamespace(
        vllm_config=engine({"ucm.sparse.base:SparseMethod": {}}, connector=True),
        kv_cache_manager=SimpleNamespace(),
        connector=OTHERS[0],
    )
    with pytest.raises(SparseMethodError, match="NixlPullConnector"):
        hooks.scheduler_init(scheduler)
    assert hooks.method_of(scheduler) is None


# The hooks that this needs.


@pytest.mark.parametrize(
    ("method", "shared", "needed"),
    [
        ({"ucm.sparse.base:SparseMethod": {}}, False, ()),
        ({"ucm.sparse.base:SparseMethod": {}}, True, ("SCHEDULER",)),
        ({"Probe": {"report_dir": "unused"}}, True, ()),
        (REROPE, True, ("ATTENTION", "SCHEDULER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")),
    ],
)
def test_a_method_needs_the_scheduler_where_its_kv_is_shared(
    method: dict[str, Any], shared: bool, needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine(method, connector=shared)
    assert sharing.needed_groups(type(method_of(config)), config) == needed
    monkeypatch.setenv("UCM_DISABLE_SCHEDULER_PATCH", "1")
    if "ucm.sparse.base:SparseMethod" in method:
        scheduler = SimpleNamespace(vllm_config=config, kv_cache_manager=SimpleNamespace(), connector=None)
        with pytest.raises(SparseMethodError, match="UCM_DISABLE_SCHEDULER_PATCH") if shared else nullcontext():
            hooks.scheduler_init(scheduler)


def test_kv_events_share_kv_too() -> None:
    config = engine(REROPE)
    assert not sharing.shares_kv(config)
    config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    assert sharing.shares_kv(config)


@pytest.mark.parametrize("older", [False, True])
def test_an_overlay_that_does_not_know_the_hook_is_refused(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = ("scheduler_init",) if older else ("scheduler_init", "block_hash_function")
    manifest = SimpleNamespace(
        upstream_package="vllm",
        seams={DEFAULT_SEAM: called},
        version="0.32.0.7",
        title="vLLM 0.32.0",
        named="0.32.0",
        command=lambda name, arguments: f"`nox -s {name} -- {arguments}`",
    )
    monkeypatch.setattr(handshake, "_manifests", lambda: [manifest])
    handshake.require_seeding(method_of(engine(REROPE)))  # nothing shares its KV
    refusal = pytest.raises(SparseMethodError, match=r"build-overlay -- 0\.32\.0")
    with refusal if older else nullcontext():
        handshake.require_seeding(method_of(engine(REROPE, connector=True)))
    monkeypatch.setattr(handshake, "requests_have_hashers", lambda: False)
    handshake.require_seeding(method_of(engine(REROPE, connector=True)))


# The releases.


@pytest.mark.parametrize("release", REVIEWED)
def test_connectors_that_are_served_read_vllms_block_hashes(release: str) -> None:
    """Each has a module that reads a request's hashes, and none that hashes tokens itself."""
    tree = sources(release)
    for path in sorted(path for path in sharing.BY_BLOCK_HASH if path.startswith("vllm.")):
        name = path.partition(":")[0].replace(".", "/") + ".py"
        if not tree.exists(name):
            assert Version(release) < Version(FIRST[path.rpartition(":")[2]])
            continue
        parts = [one for one in tree.python_files() if one.startswith(PARTS[path.rpartition(":")[2]]) or one == name]
        texts = {one: text.decode() for one, text in tree.read_many(sorted(parts)).items()}
        assert any(".block_hashes" in text for text in texts.values())
        assert {one for one, text in texts.items() if "hashlib" in text} <= HASHES_SETTINGS


@pytest.mark.parametrize("release", ASCEND)
def test_connectors_of_ascend_are_where_they_are_looked_for(release: str) -> None:
    tree = sources(release, VLLM_ASCEND)
    there = {
        path
        for path in sharing.BY_BLOCK_HASH | sharing.CONTAINERS
        if path.startswith("vllm_ascend.") and tree.exists(path.partition(":")[0].replace(".", "/") + ".py")
    }
    for path in there:
        source = tree.read(path.partition(":")[0].replace(".", "/") + ".py")
        names = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
        assert path.partition(":")[2] in names
    assert bool(there) == (release not in {"0.9.1", "0.11.0"})


def test_only_known_containers_are_looked_into() -> None:
    assert compat.inner_connectors(within(OURS)) == [OURS]
    assert compat.inner_connectors(OURS) is None
