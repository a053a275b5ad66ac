"""CPU kernels: compiled by numba, a dependency of vLLM, and run by torch's threads.

A kernel runs in torch's OpenMP threads, through the entry point that compilers call. numba's own threads
would compete with them, and would all run on the single core to which vLLM binds a worker's main thread.

Kernels compute on vectors of 16 numbers. numba relies on LLVM to vectorise loops over arrays. LLVM does not keep sums
of several vectors in registers, and checks before each short loop whether its arrays overlap. Here a vector is a value
in a register.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
import multiprocessing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., None]

#: The float32 numbers in a vector: one AVX-512 register; with narrower registers the compiler uses several.
LANES = 16
#: Powers of two below this exponent vanish in a sum with 1.
LEAST_POWER = -126.0
#: The series of 2**x for a fraction of at most one half: sixth order, accurate to 1.2e-7.
SERIES = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))


Kernel = TypeVar("Kernel")


@functools.cache
def _vector_type() -> Any:
    """Return the type of a vector, registered with numba once."""
    numba: Any = importlib.import_module("numba")
    extending: Any = importlib.import_module("numba.extending")
    ir: Any = importlib.import_module("llvmlite.ir")

    class Vector(numba.types.Type):  # type: ignore[misc] # numba has no types here
        def __init__(self) -> None:
            super().__init__(name=f"float32x{LANES}")

    class Model(extending.models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.VectorType(ir.FloatType(), LANES))

    extending.register_model(Vector)(Model)
    return Vector()


class Lanes:
    """Vector functions that numba-compiled functions can call; an *address* is an int64.

    Args:
        half: Whether the KV cache is bfloat16, or else float32.

    Attributes:
        load: The vector at an address.
        store: ``store(address, vector)``.
        whole: Returns the int64 at an address.
        number: The float32 at an address.
        put: ``put(address, number)``: stores a float32.
        splat: Returns a vector with a number in all lanes.
        add: Returns the sum of two vectors; ``sub`` and ``mul`` likewise.
        fma: Returns the product of two vectors plus a third.
        greater: Returns the lane-wise maximum of two vectors.
        greatest: Returns the maximum of a vector's numbers.
        total: Returns the sum of a vector's numbers.
        exp2: Returns two to the power of each number, clamped to at least `LEAST_POWER`.
    """

    def __init__(self, *, half: bool) -> None:
        numba: Any = importlib.import_module("numba")
        self._ir: Any = importlib.import_module("llvmlite.ir")
        self._cgutils: Any = importlib.import_module("numba.core.cgutils")
        self._extending: Any = importlib.import_module("numba.extending")
        self._half = half
        ir = self._ir
        self._float, self._word, self._long = ir.FloatType(), ir.IntType(32), ir.IntType(64)
        self._vector = ir.VectorType(self._float, LANES)
        vector, address, number = _vector_type(), numba.types.int64, numba.types.float32
        self._address, self._nothing = address, numba.types.none
        make = self._intrinsic
        self.load = make(vector, (address,), self._load)
        self.store = make(None, (address, vector), self._store)
        self.number = make(number, (address,), lambda b, at: b.load(self._at(b, at, self._float), align=4))
        self.whole = make(address, (address,), lambda b, at: b.load(self._at(b, at, self._long), align=8))
        self.put = make(None, (address, number), lambda b, at, of: b.store(of, self._at(b, at, self._float), align=4))
        self.splat = make(vector, (number,), self._splat)
        self.add = make(vector, (vector, vector), lambda b, x, y: b.fadd(x, y))
        self.sub = make(vector, (vector, vector), lambda b, x, y: b.fsub(x, y))
        self.mul = make(vector, (vector, vector), lambda b, x, y: b.fmul(x, y))
        self.fma = make(vector, (vector, vector, vector), self._fma)
        self.greater = make(vector, (vector, vector), self._greater)
        self.greatest = make(number, (vector,), lambda b, x: self._folded(b, x, self._greater))
        self.total = make(number, (vector,), lambda b, x: self._folded(b, x, lambda b, x, y: b.fadd(x, y)))
        self.exp2 = make(vector, (vector,), self._exp2)

    def reading(self, step: int) -> Any:
        """Return a function that loads a vector of the cache's dtype from an address, with a stride in numbers."""
        return self._intrinsic(_vector_type(), (self._address,), lambda b, at: self._read(b, at, step))

    def bits_apart(self, words: int, planes: int) -> Any:
        """Return a function that counts the bits in which the codes of `LANES` tokens differ from a query's.

        LLVM does not turn a loop over tokens that counts bits into vectors by itself.

        Args:
            words: The words of 64 bits of a code.
            planes: The codes of the query: a bit of plane ``n`` counts ``2 ** n``.

        Returns:
            ``bits_apart(codes, stride, query)``, a vector: the address of the tokens' first words, the bytes from there
            to their next words, and the address of ``[planes, words]`` words.
        """
        ir, word = self._ir, self._word
        longs = ir.VectorType(self._long, LANES)

        def write(b: Any, codes: Any, stride: Any, query: Any) -> Any:
            kind = ir.FunctionType(longs, [longs])
            ones = self._cgutils.get_or_insert_function(b.module, kind, f"llvm.ctpop.v{LANES}i64")
            found = self._all(self._long, 0)
            for number in range(words):
                place = b.add(codes, b.mul(stride, self._long(number)))
                code = b.load(self._at(b, place, longs), align=8)
                for plane in range(planes):
                    one = b.load(self._at(b, self._plus(b, query, 8 * (plane * words + number)), self._long), align=8)
                    wanted = b.insert_element(ir.Constant(longs, ir.Undefined), one, word(0))
                    wanted = b.shuffle_vector(wanted, wanted, self._all(word, 0))
                    differ = b.call(ones, [b.xor(code, wanted)])
                    found = b.add(found, b.shl(differ, self._all(self._long, plane)))
            return b.sitofp(b.trunc(found, ir.VectorType(word, LANES)), self._vector)

        return self._intrinsic(_vector_type(), (self._address,) * 3, write)

    def stack(self, size: int) -> Any:
        """Return a function ``stack()`` that gives the address of this many bytes, constant within one function."""

        def write(builder: Any) -> Any:
            kind = self._ir.ArrayType(self._vector, -(-size // (4 * LANES)))
            return builder.ptrtoint(self._cgutils.alloca_once(builder, kind), self._long)

        return self._intrinsic(self._address, (), write)

    def product(
        self, rows: int, weights_apart: int, matrix_apart: int, sums_apart: int, vectors: int, *, fresh: bool
    ) -> Any:
        """Return a product of float32 matrices that keeps its sums in registers; strides are in bytes.

        Args:
            rows: The rows of the first matrix and the result; ``rows`` times ``vectors`` sums are kept.
            weights_apart: The row stride of the first matrix.
            matrix_apart: The row stride of the second matrix.
            sums_apart: The row stride of the result.
            vectors: The vectors in a row of the second matrix and the result.
            fresh: Whether the product replaces what is in the result, or else is added to it.

        Returns:
            ``product(weights, matrix, begin, end, sums)``: the addresses of both matrices, the range of the second
            one's rows to use, and the address of the result.
        """
        size = 4 * LANES

        def write(b: Any, weights: Any, matrix: Any, begin: Any, end: Any, sums: Any) -> None:
            kept = [  # for each row and vector a variable, which becomes a register, and its address
                [
                    (self._cgutils.alloca_once(b, self._vector), self._plus(b, sums, row * sums_apart + size * n))
                    for n in range(vectors)
                ]
                for row in range(rows)
            ]
            for one, place in itertools.chain(*kept):
                b.store(self._ir.Constant(self._vector, None) if fresh else self._load(b, place), one)
            with self._cgutils.for_range(b, end, start=begin, intp=self._long) as loop:
                row_at = b.add(matrix, b.mul(loop.index, self._long(matrix_apart)))
                weight_at = b.add(weights, b.mul(loop.index, self._long(4)))
                of_matrix = [self._load(b, self._plus(b, row_at, size * n)) for n in range(vectors)]
                for row, of_row in enumerate(kept):
                    of_weights = self._at(b, self._plus(b, weight_at, row * weights_apart), self._float)
                    weight = self._splat(b, b.load(of_weights, align=4))
                    for (one, _), read in zip(of_row, of_matrix, strict=True):
                        b.store(self._fma(b, weight, read, b.load(one)), one)
            for one, place in itertools.chain(*kept):
                self._store(b, place, b.load(one))

        return self._intrinsic(None, (self._address,) * 5, write)

    def _intrinsic(self, result: Any, arguments: tuple[Any, ...], write: Callable[..., Any]) -> Any:
        """Return an inlined function of these types, with the code that ``write`` emits."""
        signature = (self._nothing if result is None else result)(*arguments)

        def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
            found = write(builder, *given)
            return context.get_dummy_value() if result is None else found

        made = signature, generate
        by_count: tuple[Callable[..., Any], ...] = (
            lambda _of: made,
            lambda _of, _a: made,
            lambda _of, _a, _b: made,
            lambda _of, _a, _b, _c: made,
            lambda _of, _a, _b, _c, _d: made,
            lambda _of, _a, _b, _c, _d, _e: made,
        )
        return self._extending.intrinsic(by_count[len(arguments)])

    def _at(self, builder: Any, address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer())

    def _plus(self, builder: Any, address: Any, count: int) -> Any:
        return builder.add(address, self._long(count)) if count else address

    def _all(self, kind: Any, value: float) -> Any:
        return self._ir.Constant(self._ir.VectorType(kind, LANES), [value] * LANES)

    def _load(self, builder: Any, address: Any) -> Any:
        return builder.load(self._at(builder, address, self._vector), align=4)

    def _store(self, builder: Any, address: Any, value: Any) -> None:
        builder.store(value, self._at(builder, address, self._vector), align=4)

    def _splat(self, builder: Any, number: Any) -> Any:
        one = builder.insert_element(self._ir.Constant(self._vector, self._ir.Undefined), number, self._word(0))
        return builder.shuffle_vector(one, one, self._all(self._word, 0))

    def _fma(self, builder: Any, one: Any, other: Any, more: Any) -> Any:
        return self._of_llvm(builder, "fmuladd", one, other, more)

    def _of_llvm(self, builder: Any, name: str, *vectors: Any) -> Any:
        kind = self._ir.FunctionType(self._vector, [self._vector] * len(vectors))
        name = f"llvm.{name}.v{LANES}f32"
        return builder.call(self._cgutils.get_or_insert_function(builder.module, kind, name), vectors)

    def _greater(self, builder: Any, one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    def _folded(self, builder: Any, vector: Any, fold: Callable[[Any, Any, Any], Any]) -> Any:
        """Fold the lanes by halves, always in the same order."""
        width = LANES // 2
        while width:
            places = [(lane + width) % LANES for lane in range(LANES)]
            mask = self._ir.Constant(self._ir.VectorType(self._word, LANES), places)
            vector = fold(builder, vector, builder.shuffle_vector(vector, vector, mask))
            width //= 2
        return builder.extract_element(vector, self._word(0))

    def _exp2(self, builder: Any, power: Any) -> Any:
        power = self._greater(builder, power, self._all(self._float, LEAST_POWER))
        whole = self._of_llvm(builder, "rint", power)
        rest = builder.fsub(power, whole)
        found = self._all(self._float, SERIES[-1])
        for coefficient in SERIES[-2::-1]:
            found = self._fma(builder, found, rest, self._all(self._float, coefficient))
        words = self._ir.VectorType(self._word, LANES)
        exponent = builder.add(builder.fptosi(whole, words), self._all(self._word, 127))
        return builder.fmul(found, builder.bitcast(builder.shl(exponent, self._all(self._word, 23)), self._vector))

    def _stored(self, builder: Any, address: Any) -> Any:
        if not self._half:
            return builder.load(self._at(builder, address, self._float), align=4)
        short = builder.load(self._at(builder, address, self._ir.IntType(16)), align=2)
        return builder.bitcast(builder.shl(builder.zext(short, self._word), self._word(16)), self._float)

    def _read(self, builder: Any, address: Any, step: int) -> Any:
        words = self._ir.VectorType(self._word, LANES)
        upper = self._all(self._word, 16)
        if step == 1 and not self._half:
            return self._load(builder, address)
        if step == 1:  # a bfloat16 is the upper half of a float32
            shorts = self._ir.VectorType(self._ir.IntType(16), LANES)
            read = builder.load(self._at(builder, address, shorts), align=2)
            return builder.bitcast(builder.shl(builder.zext(read, words), upper), self._vector)
        if step == 2 and self._half:  # noqa: PLR2004 - pairs of tiles for AMX: read both, keep one
            pairs = builder.load(self._at(builder, builder.and_(address, self._long(-4)), words), align=4)
            place = builder.trunc(builder.and_(address, self._long(2)), self._word)
            shift = builder.insert_element(
                self._ir.Constant(words, self._ir.Undefined), builder.mul(place, self._word(8)), self._word(0)
            )
            shift = builder.shuffle_vector(shift, shift, self._all(self._word, 0))
            return builder.bitcast(builder.shl(builder.lshr(pairs, shift), upper), self._vector)
        found, size = self._ir.Constant(self._vector, self._ir.Undefined), 2 if self._half else 4
        for lane in range(LANES):
            number = self._stored(builder, self._plus(builder, address, lane * step * size))
            found = builder.insert_element(found, number, self._word(lane))
        return found


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


def compile_kernel(what: str, write: Callable[[Any, Any, Any], Callable[[Any], None]]) -> Run | None:
    """Compile a kernel; takes about a second.

    Args:
        what: As in `for_engine`.
        write: Given numba and two functions, which return the number of the calling thread and that of all threads,
            returns the function to compile. Each thread runs it with the address of the kernel's arguments, an array of
            int64.

    Returns:
        A function that runs it in all threads, with tensors, passed by address, and integers. None without numba or
        torch's OpenMP, which is logged.
    """
    try:
        numba: Any = importlib.import_module("numba")
        everywhere = ctypes.CDLL(None)  # contains torch's OpenMP
        parallel, own, count = everywhere.GOMP_parallel, everywhere.omp_get_thread_num, everywhere.omp_get_num_threads
        parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        own.argtypes = count.argtypes = ()
        signature = numba.types.void(numba.types.CPointer(numba.types.int64))
        body = numba.cfunc(signature, fastmath=True)(write(numba, own, count))
    except Exception as error:  # noqa: BLE001 - whatever numba cannot do here, torch can
        get_logger(__name__).warning("[UCM.Sparse] %s slowly, without numba: %s: %s", what, type(error).__name__, error)
        return None

    def run(*given: Any) -> None:
        arguments = np.array([of if isinstance(of, int) else of.data_ptr() for of in given], np.int64)
        parallel(body.address, arguments.ctypes.data, 0, 0)

    return run
