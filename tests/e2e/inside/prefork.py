"""A process that has imported vLLM, and forks a child for each script that it is told to run: `prefork.py DESCRIPTOR`.

The import takes longer than all else that a small engine does. The descriptor is a socket of `tests.e2e.processes`,
which sends one message for each script: a JSON object, and the descriptors of the child's standard streams and of a
socket, on which it receives the child's process id and then its exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import select
import socket
import sys
import time

#: Seconds between two looks of a process for what another one of its engine has to tell.
PAUSE = 0.0005
#: More than the longest environment.
LONGEST = 1 << 20


def serve(control: socket.socket) -> list[str]:
    """Fork a child for each message; return, in the child only, its script and the script's arguments."""
    reports: dict[int, tuple[int, socket.socket]] = {}
    told = True
    while told or reports:
        ready, _, _ = select.select([*([control.fileno()] if told else []), *reports], [], [])
        for descriptor in [one for one in ready if one in reports]:
            child, report = reports.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(OSError):  # nobody may wait for it any more
                report.send(str(code).encode())
            report.close()
            os.close(descriptor)
        if control.fileno() in ready:
            message, streams, _, _ = socket.recv_fds(control, LONGEST, 4)
            told = bool(message)
            if not told:
                continue
            child = os.fork()
            if not child:
                control.close()
                for descriptor, (_, report) in reports.items():
                    os.close(descriptor)
                    report.close()
                return become(json.loads(message), streams)
            for stream in streams[:3]:
                os.close(stream)
            reports[os.pidfd_open(child)] = child, socket.socket(fileno=streams[3])
    sys.exit()


def become(told: dict[str, object], streams: list[int]) -> list[str]:
    """Make this child what a new process would be: its session, streams, directory, environment and module path."""
    os.setsid()
    with socket.socket(fileno=streams[3]) as report:
        report.send(str(os.getpid()).encode())
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(str(told["directory"]))
    os.environ.clear()
    os.environ.update(told["variables"])  # type: ignore[call-overload]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    importlib.invalidate_caches()
    fork_processes()
    return [str(part) for part in told["command"]]  # type: ignore[attr-defined]


def fork_processes() -> None:
    """Let an engine fork its processes, as it does on GPUs.

    vLLM's CPU platform sets spawned ones without a choice, and each would import vLLM for longer than it works.
    """
    contexts = multiprocessing.get_context

    def forking(method: str | None = None) -> object:
        return contexts("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking  # type: ignore[assignment]


def sleep_while_waiting() -> None:
    """Let an engine's processes sleep while they wait for each other; vLLM has them look without a pause.

    An engine of three processes kept two processors busy, however many engines share them here.
    """
    broadcast = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    broadcast.sched_yield = lambda: time.sleep(PAUSE)  # type: ignore[attr-defined]


if __name__ == "__main__":
    for name in ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
    sleep_while_waiting()
    with socket.socket(fileno=int(sys.argv[1])) as connected:
        sys.argv = serve(connected)
    runpy.run_path(sys.argv[0], run_name="__main__")
