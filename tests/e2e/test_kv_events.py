"""What routers hear of the store, from vLLM's own publisher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.sparse_runs import run_script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: What identifies a block for a router.
SAID = ("parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "group_idx", "kv_cache_spec_kind")


def blocks(events: list[dict[str, Any]], medium: str) -> dict[Any, dict[str, Any]]:
    """The announced blocks of one medium by their hashes; vLLM announces several blocks of its own at once."""
    found = {}
    for event in events:
        if event["kind"] == "BlockStored" and event.get("medium") == medium:
            parent, size = event["parent_block_hash"], event["block_size"]
            for at, name in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][at * size : (at + 1) * size]
                found[name] = {one: event.get(one) for one in SAID} | {"parent_block_hash": parent, "token_ids": tokens}
                parent = name
    return found


def arguments(kind: str, store: Path) -> dict[str, Any]:
    """The arguments of an engine: with one of our connectors, beside one of vLLM's, or with two workers."""
    name = "BlendConnector" if kind == "blend" else "UCMConnector"
    extra: dict[str, Any] = {"store": {"directories": [str(store)]}, "kv_events": True}
    if kind == "blend":
        extra["blend"] = {}
    ours = {
        "kv_connector": name,
        "kv_connector_module_path": f"ucm.integration.vllm.{'blend' if kind == 'blend' else 'ucm'}_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if kind == "two connectors":
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store / "example")},
        }
        several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        return {"kv_transfer_config": {**several, "kv_connector_extra_config": {"connectors": [ours, other]}}}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if kind == "two ranks" else {}
    return {"kv_transfer_config": ours, **ranks}


@pytest.mark.parametrize("kind", ["plain", "blend", "two connectors", "two ranks"])
def test_the_blocks_of_the_store_have_vllms_own_names(environments: Environments, tmp_path: Path, kind: str) -> None:
    from tests.e2e.model import write_model  # noqa: PLC0415 - only engines need it

    store = tmp_path / "store"
    store.mkdir()
    spec = {"model": str(write_model(tmp_path / "m")), "store": str(store), "engine": arguments(kind, store)}
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    result = run_script(environments.runtime, tmp_path / "run", "kv_events_engine.py", spec, **several)
    for phase in ("saved", "loaded"):
        of_engine, of_store = blocks(result[phase], "GPU"), blocks(result[phase], "STORAGE")
        assert len(of_store) == 6, result[phase]
        assert of_store == {name: of_engine[name] for name in of_store}, phase
        assert {one["ownership"] for one in result[phase] if one.get("medium") == "STORAGE"} == {"posix"}
