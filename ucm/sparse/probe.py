"""A sparse method that changes nothing and counts the hooks that fire in each process: for tests and ``ucm doctor``.

Its only option is ``report_dir``, a directory for a file to which each process appends its events. Use an empty
directory for each run, because events of earlier runs look the same. Code that torch.compile traces, or that a replayed
CUDA graph skips, runs no Python and is not counted.

Each event is appended at once, so it is kept when the process dies. It is a line with the id and the name of the
process, the side of the engine, and the name of the hook.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.errors import ConfigError, UcmError
from ucm.sparse.base import Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Methods that the seam itself calls, not a rule's insertion.
_OF_THE_SEAM = (
    *("scheduler_started", "worker_started", "asks_workers", "confirms", "figures", "layer_seen", "layers_seen"),
    "bytes_beside_block",
)
#: The file of all processes, and the event of a new `Probe`.
FILE, CREATED = "probe.log", "created"
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


@dataclass(frozen=True)
class ProcessReport:
    """The counters of one process.

    Attributes:
        pid: The process id.
        process: Its name, as `multiprocessing` has it: ``MainProcess``, ``EngineCore``, ``Worker``, ….
        roles: The sides of the engine that it serves.
        counts: The counters in the order of their declaration, including zeros.
    """

    pid: int
    process: str
    roles: tuple[Role, ...]
    counts: dict[str, int]


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
            self._file = os.open(directory / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._count(CREATED)
        except OSError as error:
            raise ConfigError(
                f"no report can be written: {error.strerror}",
                where=f"ucm_sparse_config.Probe.report_dir: {directory}",
                fix="name a directory that vLLM's processes can write to",
            ) from error

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return True: it changes nothing."""
        del options
        return True

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
        if optional(scheduler_output, "ucm_sparse_meta") is not None:
            self._count(METADATA_RECEIVED)

    def _count(self, name: str) -> None:
        process = multiprocessing.current_process().name  # a forked child has another one
        os.write(self._file, f"{os.getpid()}\t{process}\t{self.role.value}\t{name}\n".encode())


def _counted(name: str) -> Callable[..., Any]:
    neutral = getattr(SparseMethod, name)

    @functools.wraps(neutral)
    def method(self: Probe, *args: Any, **keywords: Any) -> Any:
        if name not in IN_MODEL or not _is_compiling():
            self._count(name)
        return neutral(self, *args, **keywords)

    return method


def _is_compiling() -> bool:
    import torch  # noqa: PLC0415 - the module is also imported where there is none

    return bool(torch.compiler.is_compiling())


for _name in HOOKS:
    if _name not in vars(Probe):
        setattr(Probe, _name, _counted(_name))


def _report_dir(options: Mapping[str, Any]) -> Path:
    directory = options.get("report_dir")
    if len(options) != 1 or not isinstance(directory, str) or not directory:
        raise ConfigError(
            "the Probe has one option, the directory of its reports",
            where=f"ucm_sparse_config.Probe: {dict(options)!r}",
            fix='write {"report_dir": "<directory>"}',
        )
    return Path(directory).absolute()


def read_reports(directory: Path) -> list[ProcessReport]:
    """Return the current counters of each process, by process id; the processes may be running.

    Raises:
        UcmError: If the directory or the file in it cannot be read.
    """
    if not directory.is_dir():
        raise UcmError("there is no such report directory", where=str(directory), fix="give the Probe's report_dir")
    path, names, events = directory / FILE, dict[int, str](), defaultdict[int, Counter[str]](Counter)
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        for line in lines[:-1]:  # a line without an end is still being written
            pid, process, role, name = line.split("\t")
            names[int(pid)] = process
            events[int(pid)].update((Role(role).value, name))
    except (OSError, ValueError) as error:
        raise UcmError(
            f"reports cannot be read: {type(error).__name__}: {error}",
            where=str(path),
            fix="remove it, or let each run write to an empty directory of its own",
        ) from error
    return [
        ProcessReport(
            pid,
            names[pid],
            tuple(role for role in Role if counts[role.value]),
            {name: counts[name] for name in (*HOOKS, METADATA_RECEIVED)},
        )
        for pid, counts in sorted(events.items())
    ]
