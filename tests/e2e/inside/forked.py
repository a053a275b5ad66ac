"""Engines one after the other, each in a fork of one process that has imported vLLM: `forked.py ENGINES`, a JSON file.

The import takes longer than all else that a small engine does. `tests.e2e.forked_engines` writes the file: for each
engine its arguments, where its output and its answers go, and what it is told, as `converse.py` is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

#: Seconds without a new file after which none is expected.
QUIET = 2.0


def main(file: Path) -> None:
    """Run each engine to its end; one that fails has no answers."""
    specification = json.loads(file.read_text(encoding="utf-8"))
    for name in ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        import_module(name)
    make = import_module("converse").Engine
    for engine in specification["engines"]:
        child = os.fork()
        if not child:
            os.setsid()
            signal.alarm(specification["patience"])
            _run(make, engine)
        try:
            os.waitpid(child, 0)
        finally:
            # What an engine of several processes has left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def _run(make: Any, told: dict[str, Any]) -> None:
    """In the child, which ends here."""
    output = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(told["switches"])
    code = 1
    try:
        engine = make(told["arguments"])
        answers = [_obey(engine, *command) for command in told["commands"]]
        Path(told["answers"]).write_text(json.dumps(answers), encoding="utf-8")
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit()


def _obey(engine: Any, name: str, *parameters: Any) -> Any:
    return wait_until_quiet(Path(parameters[0])) if name == "wait" else getattr(engine, name)(*parameters)


def wait_until_quiet(directory: Path) -> int:
    """The files below a directory, when their number has not changed for a while."""
    known, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET:
        found = sum(path.is_file() for path in directory.rglob("*"))
        if found != known:
            known, since = found, time.monotonic()
        time.sleep(0.1)
    return known


if __name__ == "__main__":
    main(Path(sys.argv[1]))
