"""Objects that stand for anything, so that one function of a module runs without its package, and what it does is seen.

A module is executed with every import from outside the standard library replaced by such an object. A function of it
then runs to its end; each call that it makes is logged under the path by which the function reached it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

Answers = Mapping[str, Any]


class Anything:
    """An object with every attribute, call and operator.

    Args:
        path: How it was reached: ``self.input_batch.add_request()``.
        log: The calls, in order.
        answers: By path: what an attribute or call is instead, or whether it is true as a condition. ``len(path)``: how
            many parts a loop finds in it.
    """

    def __init__(self, path: str, log: list[str], answers: Answers) -> None:
        vars(self).update(_path=path, _log=log, _answers=answers, _known={})

    def _child(self, path: str) -> Any:
        if path in self._answers and not isinstance(self._answers[path], bool):
            return self._answers[path]
        return self._known.setdefault(path, Anything(path, self._log, self._answers))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._child(f"{self._path}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        self._known[f"{self._path}.{name}"] = value

    def __call__(self, *given: object, **named: object) -> Any:
        if len(given) == 1 and not named and _is_definition(given[0]):
            return given[0]  # a decorator: what it decorates stays as it is
        arguments = [*map(shown, given), *(f"{name}={shown(value)}" for name, value in named.items())]
        self._log.append(f"{self._path}({', '.join(arguments)})")
        return self._child(f"{self._path}()")

    def __getitem__(self, key: object) -> Any:
        return self._child(f"{self._path}[{shown(key)}]")

    def __setitem__(self, key: object, value: object) -> None:
        self._log.append(f"{self._path}[{shown(key)}] = {shown(value)}")

    def __delitem__(self, key: object) -> None:
        self._log.append(f"del {self._path}[{shown(key)}]")

    def __enter__(self) -> Any:
        self._log.append(f"enter {self._path}")
        return self._child(f"{self._path}.entered")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"leave {self._path}")

    def __bool__(self) -> bool:
        return bool(self._answers.get(self._path, False))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over as many parts as the answers say; where a tuple of names is assigned, over as many as these."""
        frame = sys._getframe(1)
        count = _unpacked(frame.f_code, frame.f_lasti) or int(self._answers.get(f"len({self._path})", 0))
        return iter([self._child(f"{self._path}[{number}]") for number in range(count)])

    def __len__(self) -> int:
        return int(self._answers.get(f"len({self._path})", 0))

    def __index__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __hash__(self) -> int:
        return hash(self._path)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __contains__(self, _: object) -> bool:
        return False

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return str(self._path)


def _operator(sign: str) -> Callable[..., Any]:
    def operate(self: Anything, *other: object) -> Any:
        return self._child(f"({self._path} {sign} {', '.join(map(shown, other))})")

    return operate


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_BITS = {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "matmul": "@"}
for _name, _sign in (_ARITHMETIC | _BITS).items():
    setattr(Anything, f"__{_name}__", _operator(_sign))
    setattr(Anything, f"__r{_name}__", _operator(f"r{_sign}"))
for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "neg", "invert": "~"}.items():
    setattr(Anything, f"__{_name}__", _operator(_sign))


def shown(value: object) -> str:
    """Return how a value appears in the log."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    if callable(value) and not isinstance(value, Anything):
        return str(getattr(value, "__name__", "callable"))
    return f"{value!r}"


def _is_definition(value: object) -> bool:
    return isinstance(value, type) or (callable(value) and not isinstance(value, Anything))


def _unpacked(code: CodeType, offset: int) -> int:
    """Return the number of names that the instruction at an offset unpacks; 0 if it does not unpack."""
    at = next((one for one in dis.get_instructions(code) if one.offset == offset), None)
    return int(at.arg or 0) if at is not None and at.opname == "UNPACK_SEQUENCE" else 0


def load(source: bytes, path: str, log: list[str], answers: Answers) -> ModuleType:
    """Execute a module whose imports from outside the standard library stand for anything.

    Args:
        source: The module.
        path: Its path in its package.
        log: Where calls are logged.
        answers: See `Anything`.
    """
    module = ModuleType(path.removesuffix(".py").replace("/", "."))

    def imported(name: str, _globals: object = None, _locals: object = None, of: Any = (), level: int = 0) -> Any:
        if not level and name.partition(".")[0] in sys.stdlib_module_names:
            return __import__(name, None, None, of, level)
        return Anything(name if of else name.partition(".")[0], log, answers)

    builtins = {**vars(__import__("builtins")), "__import__": imported, "isinstance": _isinstance}
    vars(module)["__builtins__"] = builtins
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - a published module
    return module


def _isinstance(value: object, kind: Any) -> bool:
    """Objects that stand for anything are instances of nothing."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, tuple(one for one in kinds if isinstance(one, type)))
