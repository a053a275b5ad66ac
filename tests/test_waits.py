"""No unit test waits for real time, and the product takes time and threads from its clock; exceptions have a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_MODULES = ("time", "threading", "queue", "concurrent.futures", "asyncio")
#: What never waits: locks whose holder does not wait either, identities of threads, and measurements for a report.
_HARMLESS = {
    *("threading.Lock", "threading.local", "threading.get_ident", "threading.get_native_id", "threading.enumerate"),
    *("threading.current_thread", "threading.main_thread", "queue.Empty", "time.perf_counter", "time.strftime"),
    *("time.localtime", "time.gmtime", "time.process_time", "time.thread_time"),
}
_NATIVE = ("threading.", "queue.", "concurrent.futures.")
_WAITS = ("wait", "wait_for", "join", "result", "exception", "get", "acquire")
_NOW = ("time.monotonic", "time.time", "time.time_ns", "time.perf_counter")
_SLEEPS = ("time.sleep", "asyncio.sleep")

_SERVER = "a real server starts, stops or answers"
_AGE = "compares the time of day with those of files, in a command that waits for nothing"
_NAME = "writes the time of day into a file or its name"
#: Where the rule does not hold, what of it, and why.
EXCEPTIONS: dict[str, tuple[set[str], str]] = {
    "tests/ucm/store/ceph.py": ({"polls", "sleeps"}, _SERVER),
    "tests/ucm/store/line.py": ({"sleeps"}, "asyncio.sleep on an event loop whose time is the simulated clock's"),
    "tests/ucm/store/remote_blocks.py": ({"polls", "sleeps"}, _SERVER),
    "tests/ucm/store/servers.py": ({"polls", "sleeps"}, _SERVER),
    "tests/ucm/store/test_cephfs.py": ({"polls", "sleeps", "waits natively"}, _SERVER),
    "tests/ucm/store/test_mooncake.py": ({"polls"}, _SERVER),
    "tests/ucm/store/test_redis.py": ({"polls", "sleeps", "waits natively"}, _SERVER),
    "tests/test_clock.py": ({"sleeps", "waits natively"}, "tests the clocks against the library's threads"),
    "ucm/commands/store/gc.py": ({"time.time"}, _AGE),
    "ucm/commands/store/ls.py": ({"time.time"}, _AGE),
    "ucm/commands/store/text.py": ({"time.time"}, _AGE),
    "ucm/store/inspection.py": ({"time.time"}, _AGE),
    "ucm/store/memory/dram.py": ({"time.time_ns"}, "compares the time of day with a directory's"),
    "ucm/store/posix/files.py": ({"time.time_ns"}, _NAME),
    "ucm/store/posix/layout.py": ({"time.time_ns"}, _NAME),
    "ucm/commands/store/prompt.py": ({"concurrent.futures.ThreadPoolExecutor"}, "a command copies blocks in parallel"),
    "ucm/commands/store/verify.py": ({"concurrent.futures.ThreadPoolExecutor"}, "a command reads blocks in parallel"),
    "ucm/engine_process.py": ({"time.sleep"}, "lets the files of a model grow older than the engine that starts next"),
    "ucm/integration/vllm/weightless.py": (
        {"time.sleep"},
        "a command waits until a thread of the connector has read the weights",
    ),
    "ucm/prove/engine.py": ({"time.monotonic", "time.sleep"}, "runs in a process of its own, beside a real engine"),
    "ucm/prove/run.py": ({"time.monotonic"}, "the default of a parameter"),
    "ucm/store/remote/mooncake_client.py": (
        {"concurrent.futures.Future"},
        "holds a result and cancels a call; nobody waits in it, but for an event of the clock",
    ),
    "ucm/testing/conformance.py": (
        {"concurrent.futures.ThreadPoolExecutor"},
        "tries a store of any author with real threads, and waits for their end only",
    ),
}


class Uses(ast.NodeVisitor):
    """Collects what a file uses of the modules that wait.

    Attributes:
        names: Dotted names, such as ``time.sleep``.
        waits: What a test must not do: ``sleeps``, ``waits natively``, ``polls``, ``patches time``.
    """

    def __init__(self, source: str) -> None:
        self.names: set[str] = set()
        self.waits: set[str] = set()
        self._known: dict[str, str] = {}
        self._timed_waits = False
        self.visit(ast.parse(source))
        if self._timed_waits and any(name.startswith(_NATIVE) and name not in _HARMLESS for name in self.names):
            self.waits.add("waits natively")
        if self.names & set(_SLEEPS):
            self.waits.add("sleeps")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in _MODULES:
                self._known[alias.asname or alias.name] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if name in _MODULES:
                self._known[alias.asname or alias.name] = name
            elif node.module in _MODULES:
                self._known[alias.asname or alias.name] = name
                self.names.add(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._dotted(node):
            self.names.add(name)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        inside = {self._dotted(part) for part in ast.walk(node)}
        if inside & {*_NOW, *_SLEEPS}:
            self.waits.add("polls")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in _WAITS and not isinstance(node.func.value, ast.Constant):
                values = [*node.args, *(word.value for word in node.keywords if word.arg == "timeout")]
                self._timed_waits |= any(_is_duration(value) for value in values)
            if node.func.attr in {"setattr", "object", "patch"} and any(self._is_time(value) for value in node.args):
                self.waits.add("patches time")
        self.generic_visit(node)

    def _dotted(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            module = self._known.get(_written(node.value), "")
            return f"{module}.{node.attr}" if module in _MODULES else ""
        return self._known.get(node.id, "") if isinstance(node, ast.Name) else ""

    def _is_time(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.rpartition(".")[2] == "time" or node.value.startswith("time.")
        return self._dotted(node) == "time"


def _written(node: ast.AST) -> str:
    """Return a dotted name as it is written; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        holder = _written(node.value)
        return f"{holder}.{node.attr}" if holder else ""
    return node.id if isinstance(node, ast.Name) else ""


def _is_duration(node: ast.AST) -> bool:
    """Return whether an argument is a number, or a constant's name."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    return isinstance(node, ast.Name) and node.id.isupper()


def broken(path: Path) -> set[str]:
    """Return what of the rule a file breaks."""
    where, uses = path.relative_to(ROOT).as_posix(), Uses(path.read_text("utf-8"))
    if where.startswith("tests/"):
        return uses.waits
    return {name for name in uses.names if not name.startswith("asyncio")} - _HARMLESS


def files() -> list[Path]:
    """Return the product's files and those of the unit tests."""
    tests = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path.relative_to(ROOT / "tests").parts[0] not in {"e2e", "campaign", "fuzz.py"}
    ]
    clocks = {ROOT / "ucm/clock.py", ROOT / "tests/clock.py"}
    return sorted({*tests, *(ROOT / "ucm").rglob("*.py")} - clocks)


def test_nothing_waits_but_what_has_a_reason() -> None:
    found = {path.relative_to(ROOT).as_posix(): broken(path) for path in files()}
    found = {where: what for where, what in found.items() if what}
    expected = {where: what for where, (what, _) in EXCEPTIONS.items()}
    assert found == expected, "use the clock (ucm/clock.py), give a reason in EXCEPTIONS, or remove one that has ended"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ntime.sleep(1)", {"sleeps"}),
        ("from time import sleep as rest\nrest(1)", {"sleeps"}),
        ("import asyncio\nasync def f(): await asyncio.sleep(0)", {"sleeps"}),
        ("import threading\nthreading.Event().wait(60)", {"waits natively"}),
        ("from threading import Thread\nThread().join(timeout=5)", {"waits natively"}),
        ("from concurrent.futures import Future\nLONG = 9\nFuture().result(LONG)", {"waits natively"}),
        ("import queue\nqueue.Queue().get(timeout=1.5)", {"waits natively"}),
        ("import time\nwhile time.monotonic() < 5: pass", {"polls"}),
        ("import time as t\nwhile True:\n    assert t.time() < 5", {"polls"}),
        ("import module\nmonkeypatch.setattr(module, 'time', 1)", {"patches time"}),
        ("monkeypatch.setattr('time.monotonic', 1)", {"patches time"}),
        ("import time\nmonkeypatch.setattr(time, 'time', 1)", {"patches time"}),
        ("import threading\nthreading.Event().wait()\n', '.join(NAMES)", set()),
        ("clock.event().wait(60)\nprocess.wait(timeout=60)", set()),
        ("import time\nbegan = time.time()", set()),
    ],
)
def test_each_kind_is_found(source: str, expected: set[str]) -> None:
    assert Uses(source).waits == expected


def test_a_name_is_found_however_it_is_imported() -> None:
    imports = "import time\nfrom threading import Event\nfrom concurrent import futures\nimport concurrent.futures\n"
    uses = "time.sleep\nfutures.wait\nconcurrent.futures.Future\n"
    assert Uses(imports + uses).names == {
        *("time.sleep", "threading.Event", "concurrent.futures.wait", "concurrent.futures.Future"),
    }
