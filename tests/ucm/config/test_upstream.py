"""UCM's own configuration files are translated key by key, and no key is silently dropped."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.ucm.config.conftest import UPSTREAM
from ucm.config import ConnectorConfig, load_connector_config
from ucm.config.document import read_document
from ucm.config.settings import BlendSettings
from ucm.config.upstream import translate
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def load(name: str) -> ConnectorConfig:
    return load_connector_config({"UCM_CONFIG_FILE": str(UPSTREAM / f"{name}.yaml")})


def test_a_pipeline(upstream: Path, tmp_path: Path) -> None:
    config = load("pipeline")
    assert config.connector == "layerwise"
    assert config.store.as_store_config() == StoreConfig(
        pipeline="Cache|Posix",
        directories=(str(tmp_path / "kv" / "a"), str(tmp_path / "kv" / "b")),
        posix_capacity_bytes=512 * MIB,
        dram_capacity_bytes=32 * MIB,
        failures_until_rest=5,
        rest_seconds=12,
    )
    assert upstream.is_dir()


@pytest.mark.usefixtures("upstream")
def test_the_nfs_store_is_the_posix_store(tmp_path: Path, said: list[str]) -> None:
    config = load("nfs")
    assert config.connector == "direct"
    assert config.store.as_store_config() == StoreConfig(directories=(str(tmp_path / "kv"),))
    for key in ("stream_number", "buffer_number", "shard_data_dir", "timeout_ms"):
        assert _told(said, f"ucm_connectors[0].ucm_connector_config.{key}"), key
    assert _told(said, "load_only_first_rank")
    assert _told(said, "enable_event_sync")


def test_the_pooled_dram_store_is_the_dram_tier(said: list[str]) -> None:
    pooled = load("pooled_dram").store
    assert (pooled.pipeline, pooled.dram_capacity) == ("Dram", None)
    assert _told(said, "ucm_connectors[0].ucm_connector_config.node_control_endpoints").endswith(
        "it belongs to the pooled DRAM store"
    )


@pytest.mark.usefixtures("upstream")
def test_blending(said: list[str]) -> None:
    config = load("blend")
    assert config.ucm_sparse_config == {}
    assert config.blend == BlendSettings(select="question", ratio=0.3, chunk_end_token_ids=(3,))
    assert _told(said, "ucm_sparse_config.Blend.compute_meta.model.layers.1.self_attn.attn")


@pytest.mark.parametrize(
    ("options", "what", "place"),
    [
        (
            {"Blend": {}, "GSA": {}},
            "must be a mapping, and cannot be combined with a sparse method",
            "ucm_sparse_config = ",
        ),
        (
            {"Blend": {"compute_meta": {"a.1": {"ratio": 0.2}, "a.2": {"ratio": 0.2}}}},
            "must be one layer",
            "compute_meta",
        ),
        ({"Blend": {"compute_meta": {"a.1.attn": {"ratio": 2}}}}, "ratio", "compute_meta"),
        ({"Blend": {"chunk_end_token": 3}}, "is not a setting", "chunk_end_token"),
    ],
)
def test_blending_that_is_not_understood(options: Any, what: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_connector_config({"store": {"directories": str(tmp_path)}, "ucm_sparse_config": options})
    assert what in str(caught.value)
    assert place in str(caught.value)


@pytest.mark.parametrize("blend", [{}, 3])
def test_blending_in_both_forms(blend: Any, tmp_path: Path) -> None:
    written = {"ucm_sparse_config": {"Blend": {}}, "store": {"directories": str(tmp_path)}, "blend": blend}
    with pytest.raises(ConfigError, match="sets the same as blend"):
        load_connector_config(written)


@pytest.mark.usefixtures("upstream")
def test_every_documented_switch(said: list[str]) -> None:
    config = load("developer")
    assert config.hit_ratio == 0.75
    assert config.min_hit_tokens == 1025
    assert config.metrics
    assert config.ucm_sparse_config == {"GSAOnDevice": {}}
    assert config.store.posix_capacity is None
    assert config.store.failures_until_rest == 4
    assert _told(said, "metrics_config_path")


@pytest.mark.parametrize("name", ["pipeline", "nfs", "blend", "pooled_dram", "developer"])
@pytest.mark.usefixtures("upstream")
def test_no_key_is_dropped_in_silence(name: str) -> None:
    """Each value in a file is either the origin of one of our settings or has exactly one notice."""
    file = UPSTREAM / f"{name}.yaml"
    document = read_document({"UCM_CONFIG_FILE": str(file)})
    out = translate(document, ConnectorConfig.model_fields)
    assert not out.problems
    used = {place.path for place, _ in out.origins.values()}
    for path in _leaves(yaml.safe_load(file.read_text("utf-8"))):
        if path.rpartition(".")[2] == "ucm_connector_name":
            continue
        notices = [line for line in out.notices if line.startswith(f"{file}: {path} ")]
        covered = any(path == place or path.startswith((f"{place}.", f"{place}[")) for place in used if place)
        assert covered or len(notices) == 1, path


@pytest.mark.usefixtures("upstream")
@pytest.mark.parametrize(
    ("name", "what", "place"),
    [
        ("mooncake", "this pipeline is not in this version", "store_pipeline = 'Mooncake|Posix'"),
        ("compress", "this pipeline is not in this version", "store_pipeline = 'Cache|Compress|Posix'"),
        ("ds3fs", "this pipeline is not in this version", "store_pipeline = 'Cache|Ds3fs'"),
    ],
)
def test_what_is_not_in_this_version(name: str, what: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert caught.value.what == what
    assert caught.value.where.startswith(f"{UPSTREAM / name}.yaml: ")
    assert place in caught.value.where
    assert caught.value.fix
    assert ("lend no memory" in caught.value.fix) == (name == "mooncake")


#: Stands for a directory of the test, which every user can write to.
PLACE = "/place"
NFS = {"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": {"storage_backends": PLACE}}


@pytest.mark.parametrize(
    ("extra", "where", "what"),
    [
        ({"ucm_connectors": []}, "ucm_connectors = []", "0 connectors, where one is expected"),
        ({"ucm_connectors": [NFS, NFS]}, "ucm_connectors = ", "2 connectors, where one is expected"),
        ({"ucm_connectors": NFS}, "ucm_connectors = ", "not a list, where one is expected"),
        ({"ucm_connectors": ["UcmNfsStore"]}, "ucm_connectors[0] = 'UcmNfsStore'", "not a mapping"),
        (
            {"ucm_connectors": [{**NFS, "ucm_conector_config": {}}]},
            "ucm_connectors[0].ucm_conector_config = {}",
            "'ucm_conector_config' is not a setting",
        ),
        (
            {"ucm_connectors": [{"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": 3}]},
            "ucm_connectors[0].ucm_connector_config = 3",
            "not a mapping",
        ),
        (
            {"ucm_connectors": [{"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": None}]},
            "ucm_connectors[0].ucm_connector_config = None",
            "not a mapping",
        ),
        (
            {"ucm_connectors": [{"ucm_connector_config": {"storage_backends": PLACE}}]},
            "ucm_connectors[0].ucm_connector_name",
            "a store without a name",
        ),
        (
            {"ucm_connectors": [{"ucm_connector_name": "UcmTapeStore", "ucm_connector_config": {}}]},
            "ucm_connectors[0].ucm_connector_name = 'UcmTapeStore'",
            "there is no store 'UcmTapeStore' in this version",
        ),
        (
            {"ucm_connectors": [NFS], "ucm_connector_name": "UcmNfsStore"},
            "ucm_connector_name = 'UcmNfsStore'",
            "ucm_connector_name is not in this version",
        ),
        (
            {"ucm_connectors": [{**NFS, "ucm_connector_module_path": "acme.tape"}]},
            "ucm_connectors[0].ucm_connector_module_path = 'acme.tape'",
            "ucm_connectors[0].ucm_connector_module_path is not in this version",
        ),
        (
            {"ucm_connectors": [NFS], "store": {"directories": PLACE}},
            "ucm_connectors = ",
            "sets the same as store",
        ),
        ({"use_layerwise": "yes"}, "use_layerwise = 'yes'", "neither true nor false"),
        ({"use_layerwise": True, "connector": "direct"}, "use_layerwise = True", "sets the same as connector"),
        ({"enable_metrics": 1}, "enable_metrics = 1", "neither true nor false"),
        ({"load_tokens_threshold": -1}, "load_tokens_threshold = -1", "less than 0"),
        ({"load_tokens_threshold": True}, "load_tokens_threshold = True", "not a whole number"),
        ({"ucm_sparse_method": 3}, "ucm_sparse_method = 3", "ucm_sparse_method is not in this version"),
        ({"use_lite": True}, "use_lite = True", "use_lite is not in this version"),
        ({"hit_ratio": "0.9"}, "hit_ratio = '0.9'", "not a number"),
    ],
)
def test_what_is_wrong_with_a_file_of_ucms(
    extra: dict[str, Any], where: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = json.loads(json.dumps(extra).replace(PLACE, str(tmp_path)))
    if not {"ucm_connectors", "ucm_connector_name"} & extra.keys():
        extra = {**extra, "store": {"pipeline": "Empty"}}
    with pytest.raises(ConfigError, match=f"^{re.escape(what)}\n") as caught:
        load_connector_config(extra)
    assert caught.value.where.startswith(f"kv_connector_extra_config: {where}")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("storage_backend", "/mnt", "'storage_backend' is not a setting"),
        ("storage_backends", 3, "not a list"),
        ("storage_backends", ["/mnt", 3], "not a text"),
        ("posix_capacity_gb", -1, "not a number of 0 or more"),
        ("posix_capacity_gb", "1TB", "not a number of 0 or more"),
        ("posix_capacity_gb", True, "not a number of 0 or more"),
        ("store_health", True, "not a mapping"),
        ("store_health", {"enable": True}, "'enable' is not a setting"),
        ("store_health", {"failure_threshold": 0}, "less than 1"),
    ],
)
def test_what_is_wrong_with_its_store(key: str, value: object, what: str, tmp_path: Path) -> None:
    config = {"storage_backends": str(tmp_path), key: value}
    with pytest.raises(ConfigError) as caught:
        load_connector_config(
            {"ucm_connectors": [{"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": config}]}
        )
    assert what in str(caught.value)
    assert "|" not in caught.value.fix, "a pattern of the table"
    assert f"ucm_connectors[0].ucm_connector_config.{key}" in str(caught.value)


def test_a_size_is_not_for_a_tier_that_is_not_there(tmp_path: Path) -> None:
    config = {"storage_backends": str(tmp_path), "cache_buffer_capacity_gb": 1}
    with pytest.raises(ConfigError, match="dram_capacity does not apply to the store 'Posix'"):
        load_connector_config({"ucm_connectors": [{**NFS, "ucm_connector_config": config}]})


def _told(lines: list[str], path: str) -> str:
    """Return the only line that says that a setting has no effect; empty if there is none."""
    found = [line for line in lines if re.search(rf": {re.escape(path)} has no effect here: ", line)]
    assert len(found) <= 1
    return "".join(found)


def _leaves(settings: object, path: str = "") -> list[str]:
    """Return the paths of all values other than mappings and lists of mappings, as messages write them."""
    if isinstance(settings, dict) and settings:
        return [leaf for key, one in settings.items() for leaf in _leaves(one, f"{path}.{key}" if path else key)]
    if isinstance(settings, list) and any(isinstance(one, dict) for one in settings):
        return [leaf for index, one in enumerate(settings) for leaf in _leaves(one, f"{path}[{index}]")]
    return [path]


@pytest.mark.parametrize(("value", "says"), [(1e-4, "bytes"), (math.inf, "not a number"), (-1, "not a number")])
def test_a_capacity_that_cannot_be_meant(value: float, says: str) -> None:
    config = {"store_pipeline": "Dram", "cache_buffer_capacity_gb": value}
    store = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": config}
    with pytest.raises(ConfigError, match=says) as caught:
        load_connector_config({"ucm_connectors": [store]})
    assert "cache_buffer_capacity_gb = " in str(caught.value.where)
