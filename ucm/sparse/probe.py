"""A sparse method that changes nothing and counts the hooks that fire in each process: for tests and ``ucm doctor``.

Its only option is ``report_dir``, a directory for one counter file per process (see `ucm.sparse.counters`). Use an
empty directory for each run, because files of earlier runs look the same.

Code that torch.compile traces, or that a replayed CUDA graph skips, runs no Python and is not counted.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError, UcmError
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.counters import Counters, ProcessReport, read_counters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["HOOKS", "METADATA_RECEIVED", "Probe", "ProcessReport", "read_reports"]

#: Methods that the seam itself calls, not a rule's insertion.
_OF_THE_SEAM = (
    *("scheduler_started", "worker_started", "asks_workers", "confirms", "figures", "layer_seen", "layers_seen"),
)
#: The counted methods, in their order in `SparseMethod`.
HOOKS = tuple(
    name
    for name, member in vars(SparseMethod).items()
    if callable(member) and not name.startswith("_") and name not in _OF_THE_SEAM
)
#: Counts the steps with which the worker received the result of `Probe.build_metadata` in EngineCore.
METADATA_RECEIVED = "metadata_received"
#: The methods that run in the model's forward: torch.compile may trace them, so they must not modify state.
IN_MODEL = tuple(name for name in HOOKS if name.startswith(("kv_write_", "attention_", "mla_", "layer_", "ffn_")))

_STEM = "probe"
_OPTION = "report_dir"
_WHERE = "ucm_sparse_config.Probe"


class Probe(SparseMethod):
    """Counts its calls, and otherwise does nothing.

    Raises:
        ConfigError: If an option is missing or unknown, or the directory cannot be created.
    """

    optional_hooks = True

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._step = 0
        directory = _report_dir(options)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._counters = _counters(directory)
            self._counters.enter(role)
        except OSError as error:
            raise ConfigError(
                f"no report can be written: {error.strerror}",
                where=f"{_WHERE}.{_OPTION}: {directory}",
                fix="name a directory that vLLM's processes can write to",
            ) from error

    def build_metadata(self, scheduler_output: Any) -> object:
        """Return the number of the step, for the workers."""
        del scheduler_output
        self._count("build_metadata")
        self._step += 1
        return {"step": self._step}

    def update_states(self, runner: Any, scheduler_output: Any) -> None:
        """Count the step, and its metadata."""
        del runner
        self._count("update_states")
        if getattr(scheduler_output, "ucm_sparse_meta", None) is not None:
            self._count(METADATA_RECEIVED)

    def _count(self, name: str) -> None:
        self._counters.add(name, self.role)


def _counted(name: str) -> Callable[..., Any]:
    neutral = getattr(SparseMethod, name)

    @functools.wraps(neutral)
    def method(self: Probe, *args: Any, **keywords: Any) -> Any:
        self._count(name)
        return neutral(self, *args, **keywords)

    @functools.wraps(neutral)
    def traceable(self: Probe, *args: Any, **keywords: Any) -> Any:
        import torch  # noqa: PLC0415 - the module is also imported where there is none

        if not torch.compiler.is_compiling():
            self._count(name)
        return neutral(self, *args, **keywords)

    return traceable if name in IN_MODEL else method


for _name in HOOKS:
    if _name not in vars(Probe):
        setattr(Probe, _name, _counted(_name))


def read_reports(directory: Path) -> list[ProcessReport]:
    """Return the current counters of each process, by process id; the processes may be running.

    Raises:
        UcmError: If the directory or a report in it cannot be read.
    """
    if not directory.is_dir():
        raise UcmError("there is no such report directory", where=str(directory), fix=f"give the Probe's {_OPTION}")
    return sorted((read_counters(path) for path in directory.glob(f"{_STEM}-*.bin")), key=lambda report: report.pid)


@functools.cache
def _counters(directory: Path) -> Counters:
    """Return the counters of a directory, which both roles of a process share."""
    return Counters(directory, _STEM, (*HOOKS, METADATA_RECEIVED))


def _report_dir(options: Mapping[str, Any]) -> Path:
    unknown = sorted(set(options) - {_OPTION})
    if unknown:
        raise ConfigError(
            f"the Probe has no option {unknown[0]!r}", where=_WHERE, fix=f"remove it; the only one is {_OPTION}"
        )
    directory = options.get(_OPTION)
    if not isinstance(directory, str) or not directory:
        raise ConfigError(
            "the Probe does not know where to report",
            where=f"{_WHERE}.{_OPTION}: {directory!r}",
            fix=f'write {{"{_OPTION}": "<directory>"}}',
        )
    return Path(directory).absolute()
