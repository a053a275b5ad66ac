"""CPU kernels: compiled by numba, a dependency of vLLM, and run by torch's threads.

A kernel runs in torch's OpenMP threads, through the entry point that compilers call. numba's own threads
would compete with them, and would all run on the single core to which vLLM binds a worker's main thread.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import multiprocessing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., None]

Kernel = TypeVar("Kernel")


@dataclass(frozen=True)
class Threads:
    """The thread functions that a kernel calls, in a form that numba can compile.

    Attributes:
        own: The number of the calling thread.
        count: The number of running threads.
        wait: A barrier: returns when all threads have called it.
    """

    own: Any
    count: Any
    wait: Any


def for_engine(what: str, make: Callable[[], Kernel]) -> Kernel | None:
    """Compile a kernel with ``make``; return None in a process that was not started for a single engine.

    When vLLM 0.32.0 starts an engine it inspects the contents of all modules in the process, and fails at llvmlite's,
    which numba loads. After compiling a kernel, no other engine could start in the same process.

    Args:
        what: The operation that is slow without a kernel, for the log.
        make: Called if a kernel may be compiled.
    """
    if multiprocessing.parent_process() is not None:
        return make()
    _say_why_slow(what)
    return None


@functools.cache
def _say_why_slow(what: str) -> None:
    """Log once per process, although each layer requests the kernel."""
    get_logger(__name__).warning(
        "[UCM.Sparse] %s slowly, without numba: with it, no further engine would start in this process. "
        "VLLM_ENABLE_V1_MULTIPROCESSING=1, vLLM's default, gives each engine a process of its own",
        what,
    )


def compile_kernel(what: str, write: Callable[[Any, Threads], Callable[[Any], None]]) -> Run | None:
    """Compile a kernel; takes about a second.

    Args:
        what: As in `for_engine`.
        write: Given numba and `Threads`, returns the function to compile. Each thread runs it with the address of
            the kernel's arguments, an array of int64.

    Returns:
        A function that runs it in all threads, with tensors, passed by address, and integers. None if numba
        is missing, which is logged.
    """
    try:
        numba: Any = importlib.import_module("numba")
        everywhere = ctypes.CDLL(None)  # contains torch's OpenMP
        threaded = hasattr(everywhere, "GOMP_parallel")
        threads = _threads_of(everywhere) if threaded else Threads(*map(numba.njit, (_zero, _one, _zero)))
        signature = numba.types.void(numba.types.CPointer(numba.types.int64))
        body = numba.cfunc(signature, fastmath=True)(write(numba, threads))
    except Exception as error:  # noqa: BLE001 - whatever numba cannot do here, torch can
        get_logger(__name__).warning("[UCM.Sparse] %s slowly, without numba: %s: %s", what, type(error).__name__, error)
        return None
    if threaded:
        parallel = everywhere.GOMP_parallel
        parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def run(*given: Any) -> None:
        arguments = np.array([of if isinstance(of, int) else of.data_ptr() for of in given], np.int64)
        if threaded:
            parallel(body.address, arguments.ctypes.data, 0, 0)
        else:
            body.ctypes(ctypes.cast(arguments.ctypes.data, body.ctypes.argtypes[0]))

    return run


def _zero() -> int:
    return 0


def _one() -> int:
    return 1


def _threads_of(everywhere: Any) -> Threads:
    own, count, wait = everywhere.omp_get_thread_num, everywhere.omp_get_num_threads, everywhere.GOMP_barrier
    for function in (own, count, wait):
        function.argtypes = ()
    wait.restype = None
    return Threads(own, count, wait)


def address_as_pointer(numba: Any) -> Any:
    """Return a function that turns an address into a pointer, for ``carray``; it is compiled inline."""
    types = numba.types

    def at(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(types.voidptr))

        return types.voidptr(address), generate

    return numba.extending.intrinsic(at)
