"""Find the rewritten functions that other packages have replaced, and which package replaced them.

Other packages rebind vLLM's functions and classes at run time. A replacement that calls ours is a wrapper, so our hooks
still fire; any other replacement loses them.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from importlib import metadata
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucm.overlay.manifest import Manifest, ShadowedModule

#: Attributes in which wrappers keep their target: decorators, class and static methods, partial objects, properties.
HOLDS = ("__wrapped__", "__func__", "func", "fget")
#: How many names to follow from a replacement to ours; with more, almost any function would reach any other.
STEPS = 2
#: An attribute that only mocks and proxies have, because they answer to every name.
NO_ATTRIBUTE = "ucm_asks_for_what_nothing_has"
Codes = tuple[CodeType, ...]


@dataclass(frozen=True)
class Definition:
    """A function or class that rules changed, as it was right after its module was loaded.

    Attributes:
        thing: The object under that name in the module or class, including its decorators.
        codes: The code objects of the functions of that name; empty for a class, and for a function that its decorator
            hides, which is recognised by `thing` alone.
        hooks: The hooks that it calls.
    """

    thing: Any
    codes: Codes
    hooks: tuple[str, ...] = ()


#: The changed definitions of each module that the overlay's loader has loaded into this process.
LOADED: dict[str, dict[str, Definition]] = {}


@dataclass(frozen=True)
class Replacement:
    """A function or class of a rewritten module that another package has replaced.

    Attributes:
        module: The rewritten module.
        name: The qualified name in it.
        by: The qualified name of the replacement.
        file: Its file; empty if unknown.
        distribution: The distribution that installed the file; empty if unknown.
    """

    module: ShadowedModule
    name: str
    by: str
    file: str
    distribution: str

    def __str__(self) -> str:
        told = ", ".join(filter(None, (self.distribution, self.file)))
        return f"{self.module.name}.{self.name} is replaced by {self.by}" + (f" ({told})" if told else "")


def note(module: ShadowedModule, namespace: dict[str, Any], code: CodeType) -> None:
    """Record what rules changed in a module that has just been loaded."""
    LOADED[module.name] = found = {}
    for qualified, hooks in module.changed.items():
        thing = _member(namespace, qualified)
        codes = () if isinstance(thing, type) else _codes(code, qualified)
        found[qualified] = Definition(thing, codes if _leads_to(thing, codes) else (), hooks)


def replacements(manifest: Manifest, groups: Iterable[str], kind: type | None = None) -> list[Replacement]:
    """Return the overlay's functions and classes that other packages have replaced in this process.

    Args:
        manifest: The overlay's manifest.
        groups: The groups of modules to check.
        kind: The class in use, for instance the scheduler's: it may override methods without calling them.
    """
    wanted, found = set(groups), []
    for module in manifest.modules.values():
        namespace = vars(sys.modules.get(module.name, object))
        for qualified, definition in LOADED.get(module.name, {}).items() if module.group in wanted else ():
            owner, _, name = qualified.rpartition(".")
            seen: list[tuple[Any, Any]] = []  # what has the name now, and its class
            if namespace.get("__name__") == module.name:
                seen.append((_member(namespace, qualified), _member(namespace, owner)))
            if kind and any((base.__module__, base.__qualname__) == (module.name, owner) for base in kind.__mro__):
                seen.append((_inherited(kind, name), kind))
            found += [
                _replacement(module, qualified, thing)
                for thing, holder in seen
                if not _is_ours(thing, definition, holder, qualified)
            ]
    return found


def _is_ours(thing: Any, definition: Definition, holder: Any, qualified: str) -> bool:
    if definition.codes:
        return _leads_to(thing, definition.codes, holder, qualified.rpartition(".")[2]) or _is_covered(
            thing, definition
        )
    derived = isinstance(thing, type) and isinstance(definition.thing, type) and issubclass(thing, definition.thing)
    return derived or thing is definition.thing


def _is_covered(thing: Any, definition: Definition) -> bool:
    """Return whether a replacement is itself a rewritten function, of any overlay, that calls all of the same hooks."""
    known = (other for of_module in LOADED.values() for other in of_module.values())
    return any(
        other.codes and set(other.hooks) >= set(definition.hooks) and _leads_to(thing, other.codes)
        for other in known
        if other.hooks
    )


def _leads_to(thing: Any, codes: Codes, holder: Any = None, name: str = "") -> bool:
    """Return whether an object is a function with one of these codes, wraps one, or names one."""
    waiting: list[tuple[Any, int]] = [(thing, STEPS)]
    seen: dict[int, Any] = {}  # holds the objects, so that no id is reused meanwhile
    while waiting:
        current, steps = waiting.pop()
        if id(current) in seen:
            continue
        seen[id(current)] = current
        if isinstance(current, FunctionType):
            if current.__code__ in codes:
                return True
            waiting += [(held, steps) for held in _enclosed(current)]
            waiting += [(base, steps) for base in _of_bases(current, holder, name)]
            if steps:
                waiting += [(named, steps - 1) for named in _named(current, holder, name)]
        if current is not None and not isinstance(current, type):
            waiting += [(held, steps) for held in _held(current)]
    return False


def _held(wrapper: Any) -> list[Any]:
    """Return the objects that a wrapper holds; none if it answers to every attribute, which would never end."""
    try:
        if hasattr(wrapper, NO_ATTRIBUTE):
            return []
        return [getattr(wrapper, attribute) for attribute in HOLDS if hasattr(wrapper, attribute)]
    except Exception:  # noqa: BLE001 - another's code: a proxy may fail in any way where there is nothing behind it
        return []


def _enclosed(function: FunctionType) -> Iterator[Any]:
    """Yield a function's closure cells and defaults, except classes, which would lead to unrelated code."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # the cell is still empty
            continue
    held = (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return (one for one in held if callable(one) and not isinstance(one, type))


def _named(function: FunctionType, holder: Any, name: str) -> Iterator[Any]:
    """Yield the functions that a function names: globals, and other members of its class."""
    for used in function.__code__.co_names:
        if isinstance(function.__globals__.get(used), FunctionType):
            yield function.__globals__[used]
        if isinstance(holder, type) and used != name:
            yield _inherited(holder, used)


def _of_bases(function: FunctionType, holder: Any, name: str) -> Iterator[Any]:
    """Yield the base-class methods of the same name that a method calls, by ``super()`` or by the class's name."""
    names = function.__code__.co_names
    if not isinstance(holder, type) or name not in names:
        return
    if "super" in names:
        place = next((n for n, base in enumerate(holder.__mro__) if function in _values(base, name)), None)
        if place is not None:
            yield next((vars(base)[name] for base in holder.__mro__[place + 1 :] if name in vars(base)), None)
    named = (function.__globals__.get(used) for used in names)
    yield from (_inherited(base, name) for base in named if isinstance(base, type) and base in holder.__mro__)


def _values(base: type, name: str) -> tuple[Any, ...]:
    held = vars(base).get(name)
    return held, getattr(held, "__func__", None)


def _member(namespace: Any, qualified: str) -> Any:
    """Return the object of a qualified name in a namespace, without binding class members; None if there is none."""
    first, *others = qualified.split(".")
    found = namespace.get(first)
    for name in others:
        found = _inherited(found, name) if isinstance(found, type) else None
    return found


def _inherited(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _codes(module: CodeType, qualified: str) -> Codes:
    """Return the code objects of a qualified name; a module may define it several times, under conditions."""
    found: Codes = (module,)
    for name in qualified.split("."):
        found = tuple(
            inner for code in found for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name == name
        )
    return found


def _replacement(module: ShadowedModule, qualified: str, thing: Any) -> Replacement:
    """Describe a replacement, with the package that it comes from, if known."""
    function = thing
    while not isinstance(function, FunctionType | type):
        inner = next(iter(_held(function)), None)
        if inner is None:
            break
        function = inner
    place = function if isinstance(function, FunctionType | type) else type(function)
    home = place.__module__ or "unknown"  # for instance code that ran in a namespace without a name
    by = f"{home}.{place.__qualname__}" if thing is not None else "nothing"
    origin = getattr(sys.modules.get(home), "__file__", None) or ""
    if isinstance(function, FunctionType):
        function = inspect.unwrap(function)  # the decorator's file is irrelevant
    file = function.__code__.co_filename if isinstance(function, FunctionType) else origin
    return Replacement(module, qualified, by, file, _distribution(home))


def _distribution(module: str) -> str:
    names = metadata.packages_distributions().get(module.partition(".")[0], [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(names))
