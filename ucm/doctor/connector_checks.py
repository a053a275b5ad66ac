"""Whether the prefix cache can work here: it needs vLLM's connector API and a few packages, and no overlay."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

from ucm.doctor.findings import Finding, Status

if TYPE_CHECKING:
    from ucm.doctor.vllm_install import Vllm

CHECK = "prefix cache"
API = "distributed/kv_transfer/kv_connector/v1/base.py"
#: What the connectors and the stores import.
NEEDS = ("numpy", "pydantic", "tqdm", "xxhash", "yaml")
#: How it is switched on; the page about it lies in the repository, not beside the runtime.
SETTING = {
    "kv_connector": "UCMConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
    "kv_connector_extra_config": {"store": {"directories": "/var/cache/ucm", "posix_capacity": "20GiB"}},
}
USE = (
    f"to use it: vllm serve MODEL --kv-transfer-config '{json.dumps(SETTING)}'",
    "all about it: docs/prefix_cache.md in the repository of the UCM overlay",
)


def check_connector(vllm: Vllm | None) -> list[Finding]:
    """Can UCM's connectors run, and what does vLLM do about blocks that fail to load?"""
    if vllm is None:
        return []
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        what = f"the connectors need {', '.join(missing)}"
        todo = f"{sys.executable} -m pip install --upgrade ucm-runtime"
        return [Finding(CHECK, Status.WARNING, what, todo=(todo,))]
    methods = _methods(vllm)
    if "get_num_new_matched_tokens" not in methods:
        what = "this vLLM has no connector API that UCM's connectors know"
        return [Finding(CHECK, Status.WARNING, what, (str(vllm.directory / API),), ("use vLLM 0.9.1 or newer",))]
    recovers = "get_block_ids_with_load_errors" in methods
    failed = (
        "vLLM computes the tokens of blocks that fail to load; where it cannot (several KV-cache groups, layer-wise), "
        "they are verified first"
        if recovers
        else "this release cannot compute the tokens of blocks that fail to load: they are verified and held first"
    )
    return [Finding(CHECK, Status.OK, "UCM's connectors can run, with or without an overlay", (failed, *USE))]


def _methods(vllm: Vllm) -> set[str]:
    """The methods of vLLM's connector class, read from its file."""
    try:
        tree = ast.parse((vllm.directory / API).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return set()
    return {
        node.name
        for found in tree.body
        if isinstance(found, ast.ClassDef) and found.name == "KVConnectorBase_V1"
        for node in found.body
        if isinstance(node, ast.FunctionDef)
    }
