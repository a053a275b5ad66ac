"""``ucm doctor --run --config FILE``: a second short engine with the sparse method or the blending of the file.

The model is the one of the run, so what is tried is that the feature starts here and does its work, not its quality.
The store is a temporary directory, never the one that the file names.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ucm.doctor.engine_run import LONGEST
from ucm.doctor.findings import Finding, Status
from ucm.doctor.run import FINISHED, TIMED_OUT, prepare_model, run_child, tail_of
from ucm.integration.vllm.config import FILE_KEY, KEY, sparse_method_config

if TYPE_CHECKING:
    from collections.abc import Mapping

CHECK = "trial"
SHOWN = 8
CONNECTOR = {
    "kv_connector": "BlendConnector",
    "kv_connector_module_path": "ucm.integration.vllm.blend_connector",
    "kv_role": "kv_both",
}
#: What says of a request what it asked for, and not what the method did.
ASKED = "requests."


def try_settings(file: Path, model: Path | None, timeout: float) -> list[Finding]:
    """Run what a file configures beside the prefix cache; nothing where that is all.

    Args:
        file: Settings that are right.
        model: A model's directory; a tiny random one is made if None.
        timeout: Seconds after which the engine is ended.
    """
    from ucm.config.load import check_connector_config  # noqa: PLC0415 - it needs pydantic
    from ucm.sparse.factory import method_class  # noqa: PLC0415 - as above

    extra = {FILE_KEY: str(file.absolute())}
    blend = check_connector_config(extra, make=False)[0].blend
    sparse = sparse_method_config(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)))
    if blend is None and sparse is None:
        return []
    directory = Path(tempfile.mkdtemp(prefix="ucm-doctor-"))
    plan: dict[str, Any] = prepare_model(model, directory)
    store = {"pipeline": "Posix", "directories": [str(directory / "store")]}
    if blend is not None:
        name = "BlendConnector"
        given = blend.model_dump(mode="json")
        own = {"kv_connector_extra_config": {"store": store, "blend": given}}
        plan |= {"engine": {"kv_transfer_config": CONNECTOR | own}, "min_tokens": blend.min_tokens}
    elif sparse is not None:
        name, options = sparse
        kind = method_class(name).options_type
        if kind is not None and "store" in kind.model_fields:
            options = {**(options or {}), "store": store}
        plan |= {"engine": {"additional_config": {KEY: {name: options}}}}
    (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    outcome, _ = run_child(directory, timeout)
    if outcome != FINISHED:
        output = directory / "output.log"
        how = "did not finish in time" if outcome == TIMED_OUT else "failed"
        details = (*tail_of(output)[-SHOWN:], f"its whole output: {output}")
        todo = f"see the end of the engine's output beside '{CHECK}'"
        return [Finding(CHECK, Status.ERROR, f"an engine with {name} {how}", details, (todo,))]
    saw = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    shutil.rmtree(directory)
    return [_of_blending(saw) if blend is not None else _of_method(name, saw["workers"][0])]


def _of_blending(saw: Mapping[str, Any]) -> Finding:
    chunks, taken, tokens = saw["chunks"], saw["taken"], saw["tokens"]
    if not chunks:
        what = (
            f"BlendConnector starts; two chunks of blend: min_tokens do not fit in {LONGEST} tokens, so none was made"
        )
        return Finding(CHECK, Status.OK, what)
    if taken:
        what = f"BlendConnector blended {chunks} chunks in a new order: {taken} of {tokens} tokens in one hit"
        return Finding(CHECK, Status.OK, what)
    what = f"BlendConnector starts, and did not find the {chunks} chunks that it had stored"
    log = "[UCM.Blend] in an engine's log says why"
    return Finding(CHECK, Status.ERROR, what, todo=(log, "report it with the output of: ucm doctor --run --json"))


def _of_method(name: str, worker: Mapping[str, Any]) -> Finding:
    figures = worker["figures"]
    did = {figure: value for figure, value in figures.items() if value and not figure.startswith(ASKED)}
    details = [f"{figure}: {value:g}" for figure, value in did.items()]
    if figures.get(f"{ASKED}opted_out"):
        details.append("a request that asked to be dense (ucm_sparse: false) was")
    else:
        details.append("all requests are served alike: none can ask to be dense (ucm_sparse: false)")
    if did:
        return Finding(CHECK, Status.OK, f"{name} ran: {worker['summary'] or 'see its figures'}", tuple(details))
    what = f"{name} starts; contexts up to {LONGEST} tokens gave it nothing to do, or it counts nothing"
    return Finding(CHECK, Status.OK, what, tuple(details[-1:]))
