"""Check a settings file as an engine does, without starting one.

The check creates nothing: the engine creates missing directories, as the user who runs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.doctor.findings import Finding, Status, has_error
from ucm.engine_process import connector, model_config
from ucm.errors import PIP, ConfigError, SparseMethodError, UcmError
from ucm.integration.vllm.sparse.config import FILE_KEY, method_of_file
from ucm.sparse.base import require_hooks
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.config.settings import ConnectorConfig
    from ucm.doctor.environment import Vllm
    from ucm.overlay.manifest import Manifest

CHECK, SPARSE, LATENT, BLENDING = "configuration", "sparse settings", "latent attention", "blending"
MODEL = "model"
#: The prefix of the name of a tier's check.
TIER = "tier"
MEMORY = "memory tier"
NEEDS_AN_ENGINE = "not checked, because that needs an engine: the model, its weights, vLLM's own settings"


def check_config(file: Path) -> list[Finding]:
    """Check whether an engine would accept the settings in a file, including the sparse method."""
    file = file.absolute()
    try:
        from ucm.config.document import read_document  # noqa: PLC0415 - the doctor also runs where pydantic is not
        from ucm.config.load import check_connector_config  # noqa: PLC0415 - likewise
    except ImportError as error:  # a missing package is a finding of its own, with what to do
        return [Finding(CHECK, Status.ERROR, f"{file} cannot be checked: {error}")]
    extra = {FILE_KEY: str(file)}
    try:
        read_document(extra)
    except ConfigError as error:
        return [_refused(CHECK, error, file)]
    try:
        config, notices = check_connector_config(extra, make=False)
    except ConfigError as error:
        findings = [_refused(CHECK, error, file)]
    else:
        what = f"{file} can be used: connector {config.connector}, store {config.store.pipeline}"
        findings = [
            Finding(CHECK, Status.OK, what, (*notices, *_remarks(config), NEEDS_AN_ENGINE)),
            *_check_memory(config),
            *_ask_tiers(config),
        ]
        sparse = check_sparse(file)
        return findings + _check_blending(config, file, beside=bool(sparse)) + sparse
    return findings + check_sparse(file)


def _check_blending(config: ConnectorConfig, file: Path, *, beside: bool) -> list[Finding]:
    """What the settings of blending want of the engine; nothing where there are none."""
    blend = config.blend
    if blend is None:
        return []
    if beside:
        what = "blending and a sparse method cannot be combined: each decides which tokens may be read"
        return [Finding(BLENDING, Status.ERROR, what, (str(file),), ("leave one of blend and ucm_sparse_config out",))]
    what = f"chunks of {blend.min_tokens} tokens or more are reused anywhere in a prompt"
    connectors = "name BlendConnector in --kv-transfer-config: the other connectors refuse these settings"
    return [Finding(BLENDING, Status.OK, what, (connectors,))]


def _check_memory(config: ConnectorConfig) -> list[Finding]:
    """Check that the Dram tier's directory is in memory, or will be."""
    from ucm.store.config import DRAM  # noqa: PLC0415 - it needs packages that the other checks do without

    root = config.store.dram_directory
    if not config.store.parts & DRAM:
        return []
    from ucm.store.memory.directory import in_memory  # noqa: PLC0415 - few configurations need it, and what it needs

    if in_memory(root):
        return []
    todo = ("name a directory below /dev/shm as dram_directory, or use the Posix tier for a disk",)
    return [Finding(MEMORY, Status.ERROR, f"{root} is not in a tmpfs, so an engine refuses it", todo=todo)]


def _ask_tiers(config: ConnectorConfig) -> list[Finding]:
    """Check whether the tiers on servers can be reached from this host."""
    from ucm.store.config import LOCAL  # noqa: PLC0415 - it needs packages that the other checks do without

    asked = [name for name in config.store.as_store_config().parts if name not in LOCAL]
    if not asked:
        return []
    from ucm.store.base import StoreError  # noqa: PLC0415 - few configurations need it, and what it needs
    from ucm.store.factory import ask_tier  # noqa: PLC0415 - likewise

    findings = []
    for name in asked:
        check = f"{TIER} {name}"
        try:
            findings.append(Finding(check, Status.OK, ask_tier(config.store.as_store_config(), name)))
        except (ConfigError, StoreError) as error:
            todo = "check that it runs, and that this host can reach it"
            findings.append(Finding.of(check, error, todo=todo))
    return findings


def asks_for_sparse_attention(findings: list[Finding]) -> bool:
    """Return whether the checked settings name a sparse method, valid or not."""
    return any(finding.check == SPARSE for finding in findings)


def check_sparse(file: Path) -> list[Finding]:
    """Check that a file's sparse method exists and its options are valid; return nothing if none is configured."""
    try:
        found = method_of_file(file)
        if found is None:
            return []
        name, options = found
        method = method_class(name)
        require_hooks(method.__name__, method.needed_hooks)
        if method.options_type is None:
            what = f"the method {name} is installed; it checks its options itself when an engine starts"
            return [Finding(SPARSE, Status.OK, what)]
        from ucm.sparse.options import parse_options  # noqa: PLC0415 - it needs pydantic

        parse_options(method.options_type, method.__name__, options)
    except SparseMethodError as error:
        return [Finding.of(SPARSE, error)]
    except ConfigError as error:
        where = error.where if str(file) in error.where else f"{file}: {error.where}"
        return [_refused(SPARSE, ConfigError(error.what, where=where, fix=error.fix), file)]
    from ucm.integration.vllm.sparse.requirements import limit_of_drafts  # noqa: PLC0415 - for few configurations

    what = f"the method {name} is installed, and its options are valid"
    drafts = f"with --speculative-config: {limit_of_drafts(served=method.serves_drafts)}"
    return [Finding(SPARSE, Status.OK, what, (*method.advice(options), drafts))]


def check_model(model: Path) -> tuple[Finding, dict[str, Any]]:
    """Check that a model's configuration can be read.

    Returns:
        The finding, and the part of the configuration that describes the language model; empty after an error.
    """
    try:
        _, text = model_config(model)
    except UcmError as error:
        return Finding(MODEL, Status.ERROR, error.what, todo=(error.fix,)), {}
    return Finding(MODEL, Status.OK, f"{model.absolute() / 'config.json'} can be read"), text


def check_latent(file: Path, text: Mapping[str, Any] | None, manifests: Sequence[Manifest]) -> list[Finding]:
    """Check that a model with latent attention (MLA) can run with the configured sparse method and the overlays.

    Args:
        file: Valid settings.
        text: The configuration that ``check_model`` returned; None: not known, which is a finding.
        manifests: Those of the installed overlays.
    """
    if text is None:
        what = "not checked, because that needs the model: add --model DIR, its directory"
        return [Finding(LATENT, Status.OK, what)]
    # The field by which vLLM knows such a model, too.
    if text.get("kv_lora_rank") is None or os.environ.get("VLLM_MLA_DISABLE") == "1":
        return []
    from ucm.integration.vllm.handshake import require_latent_hooks  # noqa: PLC0415 - for few models
    from ucm.integration.vllm.sparse.requirements import latent_attention  # noqa: PLC0415

    found = method_of_file(file)
    try:
        if found is not None and not method_class(found[0]).serves_latent:
            raise latent_attention("--model")
        require_latent_hooks(manifests)
    except SparseMethodError as error:
        return [Finding.of(SPARSE, error, "the model has latent attention")]
    return []


def _refused(check: str, error: ConfigError, file: Path) -> Finding:
    # A file that cannot be read has no settings to correct.
    unread = isinstance(error.__cause__, OSError)
    todo = f"{error.fix}: {file}" if unread else f"correct {file} as described under '{check}'"
    return replace(Finding.of(check, error), todo=(todo,))


def _remarks(config: ConnectorConfig) -> list[str]:
    """Return remarks on settings that are valid but worth a second look."""
    store = config.store
    said = [
        f"{directory} does not exist yet; the engine creates it (check that its file system is mounted)"
        for directory in store.directories
        if not Path(directory).exists()
    ]
    if store.authentication_key_file is not None:
        from ucm.store.factory import authenticator_of  # noqa: PLC0415 - few configurations need it, and what it needs

        found = authenticator_of(store.as_store_config(), of_tool=True)
        said.append(f"blocks are authenticated; the key's fingerprint is {found.fingerprint.hex() if found else None}")
    if store.directories and store.posix_capacity is None:
        said.append("posix_capacity is not set, so blocks are never evicted")
    return said


CONNECTOR = "prefix cache"
API = "distributed/kv_transfer/kv_connector/v1/base.py"
#: The packages that the connectors and the stores import, and their names on an index.
NEEDS = {"numpy": "numpy", "pydantic": "pydantic", "tqdm": "tqdm", "xxhash": "xxhash", "yaml": "pyyaml"}
#: The settings of a small store. The connector's documentation is in the repository, not in the runtime's wheel.
SMALL = {"store": {"directories": "/var/cache/ucm", "posix_capacity": "20GiB"}}
DOCUMENTATION = "documentation: docs/prefix_cache.md in the repository of the UCM overlay"


def check_connector(
    vllm: Vllm | None, file: Path | None, settings: Sequence[Finding], *, broken: bool
) -> list[Finding]:
    """Check whether UCM's connectors can run.

    Args:
        vllm: The installed vLLM, if any.
        file: The user's settings file, if any.
        settings: The findings about it.
        broken: Whether an earlier check found an error that concerns every engine here.
    """
    if vllm is None:
        return []
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:  # an error in any case: the runtime declares them, so this installation is incomplete
        what = f"the connectors need {', '.join(missing)}"
        todo = f"{PIP} install {' '.join(NEEDS[name] for name in missing)}"
        return [Finding(CONNECTOR, Status.ERROR, what, todo=(todo,))]
    file_of_api = vllm.directory / API
    if not file_of_api.is_file() or "def get_num_new_matched_tokens(" not in file_of_api.read_text(encoding="utf-8"):
        what = "this vLLM has no connector API that UCM's connectors support"
        status = Status.ERROR if file is not None else Status.WARNING
        return [Finding(CONNECTOR, status, what, (str(file_of_api),), ("use vLLM 0.9.1 or newer",))]
    if broken:
        what = "UCM's connectors cannot run before the errors above are corrected"
        return [Finding(CONNECTOR, Status.WARNING, what)]
    loads = "blocks are read into host memory and verified before they are promised to vLLM"
    details = (loads, *_how_to_use(file, settings), DOCUMENTATION)
    return [Finding(CONNECTOR, Status.OK, "UCM's connectors can run here, with or without an overlay", details)]


def _how_to_use(file: Path | None, settings: Sequence[Finding]) -> list[str]:
    """Return the command that starts vLLM with the checked settings, or with a small store; nothing if they are bad."""
    if has_error(settings):
        return []
    name = "BlendConnector" if any(finding.check == BLENDING for finding in settings) else "UCMConnector"
    setting = connector(SMALL if file is None else {FILE_KEY: str(file.absolute())}, name)
    return [f"to use it: vllm serve MODEL --kv-transfer-config {shlex.quote(json.dumps(setting))}"]
