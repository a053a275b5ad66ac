"""A file with settings, checked as an engine would check it, without one.

Nothing is made: a directory that is not there yet is left to the engine, and to the user who runs that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ucm.doctor.findings import Finding, Status
from ucm.errors import ConfigError, SparseMethodError
from ucm.integration.vllm.config import FILE_KEY, sparse_method_config
from ucm.sparse.factory import method_class
from ucm.sparse.needed_hooks import require_hooks

if TYPE_CHECKING:
    from ucm.config.settings import ConnectorConfig

CHECK, SPARSE = "configuration", "sparse settings"
NEEDS_AN_ENGINE = "not checked, because it takes an engine: the model, its weights, vLLM's own settings"


def check_config(file: Path) -> list[Finding]:
    """Would an engine take the settings in a file, and the sparse method among them?

    Args:
        file: What ``UCM_CONFIG_FILE`` will name.
    """
    file = file.absolute()
    try:
        from ucm.config.document import read_document  # noqa: PLC0415 - the doctor also runs where pydantic is not
        from ucm.config.load import check_connector_config  # noqa: PLC0415 - likewise
    except ImportError as error:
        todo = f"{sys.executable} -m pip install --upgrade ucm-runtime"
        return [Finding(CHECK, Status.ERROR, f"{file} cannot be checked: {error}", todo=(todo,))]
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
        findings = [Finding(CHECK, Status.OK, what, (*notices, *_remarks(config), NEEDS_AN_ENGINE))]
    return findings + check_sparse(extra, file)


def asks_for_sparse_attention(findings: list[Finding]) -> bool:
    """Whether the settings that were checked name a sparse method, right or wrong."""
    return any(finding.check == SPARSE for finding in findings)


def check_sparse(extra: dict[str, Any], file: Path) -> list[Finding]:
    """Is there such a sparse method, and are its options right; nothing where none is configured.

    Args:
        extra: vLLM's ``kv_connector_extra_config``.
        file: The file that it names.
    """
    try:
        # What is read of vLLM's configuration here is the connector's setting alone.
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        found = sparse_method_config(SimpleNamespace(kv_transfer_config=transfer))
        if found is None:
            return []
        name, options = found
        method = method_class(name)
        require_hooks(method.__name__, method.needed_hooks)
        if method.options_type is None:
            what = f"the method {name} is there; its options are its own to check, when an engine starts"
            return [Finding(SPARSE, Status.OK, what)]
        from ucm.sparse.options import parse_options  # noqa: PLC0415 - it needs pydantic

        parse_options(method.options_type, method.__name__, options)
    except SparseMethodError as error:
        what, *details = str(error).splitlines()
        return [Finding(SPARSE, Status.ERROR, what, tuple(details), (error.fix,))]
    except ConfigError as error:
        return [_refused(SPARSE, error, file)]
    return [Finding(SPARSE, Status.OK, f"the method {name} is there, and its options are right")]


def _refused(check: str, error: ConfigError, file: Path) -> Finding:
    what, *details = str(error).splitlines()
    todo = f"correct {file}, as said beside '{check}'"
    return Finding(check, Status.ERROR, what, tuple(details), (todo,))


def _remarks(config: ConnectorConfig) -> list[str]:
    """What is right, and worth a second look."""
    store = config.store
    said = [
        f"{directory} is not there yet: the engine makes it (is the file system that it is meant for mounted?)"
        for directory in store.directories
        if not Path(directory).exists()
    ]
    if store.directories and store.posix_capacity is None:
        said.append("posix_capacity is not set: nothing is ever deleted")
    return said
