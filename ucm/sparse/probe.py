"""A sparse method that changes nothing and counts the hooks that fire in each process: for tests and ``ucm doctor``.

Its only option is ``report_dir``, a directory for one counter file per process. Use an empty directory for each run,
because files of earlier runs look the same. Code that torch.compile traces, or that a replayed CUDA graph skips, runs
no Python and is not counted.

The counters are in a memory-mapped file: always current, and preserved when the process dies. A file
``<stem>-<pid>.bin`` has a header (magic, version, a bit per role, the length of the JSON), a JSON object with the
process and the names of its counters, and from the next multiple of eight on one u64 per name. All numbers have the
machine's byte order. A file gets its name by a rename when it is complete; an earlier one of the same process id is
replaced.
"""

from __future__ import annotations

import functools
import json
import mmap
import multiprocessing
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.errors import ConfigError, UcmError
from ucm.sparse.base import Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAGIC = b"UCMCOUNT"
VERSION = 1
HEADER = struct.Struct("=8sHBxI")
_ROLES_OFFSET = 10
_ROLES = tuple(Role)

#: Methods that the seam itself calls, not a rule's insertion.
_OF_THE_SEAM = (
    *("scheduler_started", "worker_started", "asks_workers", "confirms", "figures", "layer_seen", "layers_seen"),
    "bytes_beside_block",
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


class Counters:
    """The counters of the current process: a forked child starts its own file, from zero.

    There is no lock, which a fork could leave locked: a counter has one writing thread at a time.

    Args:
        directory: The directory of the files; it must exist.
        stem: The prefix of their names.
        names: The names of the counters.
    """

    def __init__(self, directory: Path, stem: str, names: Sequence[str]) -> None:
        self._directory = directory
        self._stem = stem
        self._names = tuple(names)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._pid = 0
        self._memory: mmap.mmap
        self._values: memoryview

    def enter(self, role: Role) -> None:
        """Record that this process serves a role; the first call in a process creates the file.

        Raises:
            OSError: If the file cannot be created.
        """
        # The process name is set some time after a fork, so os.register_at_fork would be too early.
        if os.getpid() != self._pid:
            self._create()
        self._memory[_ROLES_OFFSET] |= 1 << _ROLES.index(role)

    def add(self, name: str, role: Role) -> None:
        """Count one event of a role."""
        self.enter(role)
        self._values[self._places[name]] += 1

    def _create(self) -> None:
        pid = os.getpid()
        about = {"pid": pid, "process": multiprocessing.current_process().name, "names": self._names}
        text = json.dumps(about).encode()
        start = _values_start(len(text))
        path = self._directory / f"{self._stem}-{pid}.bin"
        draft = path.with_suffix(".tmp")
        content = HEADER.pack(MAGIC, VERSION, 0, len(text)) + text
        draft.write_bytes(content.ljust(start, b"\0") + bytes(8 * len(self._names)))
        with draft.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        draft.replace(path)
        self._values = memoryview(self._memory)[start:].cast("Q")
        self._pid = pid


def read_counters(path: Path) -> ProcessReport:
    """Return the current counters of a process, which may be running.

    Raises:
        UcmError: If the file cannot be read, or is not one of `Counters`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UcmError(f"a counter file cannot be read: {error.strerror}", where=str(path)) from error
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise _unreadable(path, "it does not start as one")
    _, version, roles, length = HEADER.unpack_from(content)
    if version != VERSION:
        raise _unreadable(path, f"it has version {version}, this UCM reads {VERSION}")
    try:
        about = json.loads(content[HEADER.size : HEADER.size + length])
        pid, process, names = int(about["pid"]), str(about["process"]), [str(name) for name in about["names"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, "its description is damaged") from error
    values = content[_values_start(length) :]
    if len(values) != 8 * len(names):
        raise _unreadable(path, f"it holds {len(values)} bytes of counters, {len(names)} counters need 8 each")
    counts = dict(zip(names, memoryview(values).cast("Q"), strict=True))
    return ProcessReport(pid, process, tuple(role for bit, role in enumerate(_ROLES) if roles >> bit & 1), counts)


def _values_start(text_length: int) -> int:
    return (HEADER.size + text_length + 7) // 8 * 8


def _unreadable(path: Path, why: str) -> UcmError:
    return UcmError(
        f"not a whole counter file: {why}",
        where=str(path),
        fix="remove it, or let each run write to an empty directory of its own",
    )


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
