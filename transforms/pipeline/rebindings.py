"""Find what a package replaces in vLLM at run time, and which hooks of vLLM's overlay that removes.

Packages such as vLLM Ascend rebind attributes of vLLM at import. This module reads each such assignment from their
sources: the attribute, its replacement, and whether the replacement calls the original. It then compares them with the
two reviewed overlays to find out, for each attribute, whether the hooks survive.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from packaging.version import Version

from transforms.engine.errors import OverlayError
from transforms.engine.marks import UNREADABLE
from transforms.pipeline.census import hooks_of_outcomes, hooks_of_release
from transforms.pipeline.pages import templates
from transforms.pipeline.product import UCM
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.sources.tree import unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transforms.pipeline.census import Hooks
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay
    from transforms.pipeline.sources.tree import SourceTree


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NOTHING = "nothing"
#: The name of an attribute that is computed when the code runs: it can be any of its holder's.
COMPUTED = "<computed>"
SETTERS = frozenset({"setattr", "__setattr__"})
TEMPLATE = "rebindings.md.j2"


class LostHooksError(OverlayError):
    """A package replaces hooked functions of vLLM, and its own overlay hooks nothing in their place."""


class Kind(Enum):
    """The kind of a replacement."""

    WRAPPER = "wrapper"  #: a function that calls the original
    SUBCLASS = "subclass"  #: a class that derives from the original
    COPY = "replacement"  #: a function or class that does neither
    VALUE = "value"  #: neither a function nor a class of the package, or unknown


@dataclass(frozen=True)
class Rebinding:
    """One attribute that is rebound.

    Attributes:
        module: The dotted name of the module that has the attribute.
        name: The attribute's qualified name in it; empty if the module itself is replaced in ``sys.modules``.
        kind: The kind of the replacement.
        by: The replacement's name in its file.
        path: The file with the assignment.
        defined_in: The file that defines the replacement, if it is a function or class of the package.
        overrides: For a subclass, the methods that it or a base of the package replaces without calling the original:
            the method's name, the file of the replacement, and its qualified name.
    """

    module: str
    name: str
    kind: Kind
    by: str
    path: str
    defined_in: str = ""
    overrides: tuple[tuple[str, str, str], ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        """The file and the qualified name of the rebound attribute; a name is empty for the whole module."""
        return f"{self.module.replace('.', '/')}.py", self.name

    @property
    def dotted(self) -> str:
        """The whole name of the rebound attribute, or the module's."""
        return f"{self.module}.{self.name}".rstrip(".")

    @property
    def reach(self) -> str:
        """The qualified name of what may be replaced; that of its holder if the attribute's own name is computed."""
        return self.name.removesuffix(COMPUTED).rstrip(".")


@dataclass(frozen=True)
class Fate:
    """A rebinding, and its consequence for the overlay of the rebound package.

    Attributes:
        rebinding: The rebinding.
        rewritten: Whether the overlay rewrites the module.
        hooked: The rules whose insertions are in the function, or in methods of the class.
        survives: Whether their calls still happen, or the package's own overlay makes those of overridden methods.
        serves: What makes the calls instead; empty if nothing has to.
        lost: The rules whose calls nothing makes any more.
    """

    rebinding: Rebinding
    rewritten: bool
    hooked: tuple[str, ...]
    survives: bool
    serves: str
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class OfRelease:
    """All rebindings of one release.

    Attributes:
        release: The release of the package that rebinds.
        paired: The vLLM release to whose overlay they are compared.
        fates: The consequence of each.
    """

    release: str
    paired: str
    fates: tuple[Fate, ...]

    @property
    def anchor(self) -> str:
        """The fragment of links to its heading."""
        return self.release.replace(".", "")

    @property
    def attributes(self) -> set[tuple[str, str]]:
        """The different attributes; several files may rebind the same one."""
        return {fate.rebinding.place for fate in self.fates}

    @property
    def rewritten(self) -> list[Fate]:
        """The rebindings in modules that the overlay rewrites."""
        return [fate for fate in self.fates if fate.rewritten]

    @property
    def hooked(self) -> list[Fate]:
        """The rebindings of functions and classes with hooks."""
        return [fate for fate in self.fates if fate.hooked]

    @property
    def served(self) -> list[Fate]:
        """The rebindings that remove hooks which the package's own overlay has."""
        return [fate for fate in self.hooked if not fate.survives and not fate.lost]

    @property
    def lost(self) -> list[Fate]:
        """The rebindings that remove hooks without a substitute."""
        return [fate for fate in self.hooked if fate.lost]

    @property
    def others(self) -> list[tuple[str, list[Fate]]]:
        """The rebindings in other modules, by the file that makes them."""
        found: dict[str, list[Fate]] = {}
        for fate in self.fates:
            if not fate.rewritten:
                found.setdefault(fate.rebinding.path, []).append(fate)
        return list(found.items())


def rebindings_page(product: Product) -> str:
    """Return the page of what a product's package rebinds in vLLM, as Markdown."""
    releases = [OfRelease(one, paired(one), tuple(fates(one, product))) for one in product.reviewed()]
    return templates().get_template(TEMPLATE).render(product=product, releases=releases)


def rebindings(tree: SourceTree, package: str, within: str) -> list[Rebinding]:
    """Return every attribute of a package that another one rebinds, in the order of the files.

    Args:
        tree: The sources of the package that rebinds.
        package: The package whose attributes are rebound.
        within: The directory of ``tree`` to search.
    """
    found: list[Rebinding] = []
    files = _Files(tree)
    for path in sorted(path for path in tree.python_files() if path.startswith(within)):
        found += _of_file(files, path, package)
    return list({(one.module, one.name, one.path): one for one in found}.values())


class _Files:
    """The files of a release, and what their names stand for; each is parsed and walked once, if it is asked for.

    Args:
        tree: The release.
    """

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._nodes: dict[str, list[ast.AST]] = {}
        self._definitions: dict[str, dict[str, Definition]] = {}

    def nodes(self, path: str) -> list[ast.AST]:
        """Return all nodes of a file's syntax tree, the outer ones first."""
        if path not in self._nodes:
            try:
                self._nodes[path] = list(ast.walk(ast.parse(self._tree.read(path))))
            except UNREADABLE as error:
                raise unreadable(path, error) from error
        return self._nodes[path]

    def definition(self, path: str, name: str) -> tuple[str, Definition | None]:
        """Return the function or class that a name of a file stands for, and the file that defines it."""
        own = self._own(path).get(name)
        if own is not None:
            return path, own
        for node in reversed(self.nodes(path)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                of = next((alias.name for alias in reversed(node.names) if (alias.asname or alias.name) == name), "")
                beside = f"{node.module.replace('.', '/')}.py"
                if of and beside.partition("/")[0] == path.partition("/")[0] and self._tree.exists(beside):
                    found = self._own(beside).get(of)
                    if found is not None:
                        return beside, found
        return "", None

    def _own(self, path: str) -> dict[str, Definition]:
        if path not in self._definitions:
            self._definitions[path] = {node.name: node for node in self.nodes(path) if isinstance(node, Definition)}
        return self._definitions[path]


def fates(release: str, product: Product, own: Hooks | None = None, tree: SourceTree | None = None) -> list[Fate]:
    """Return the consequence of each rebinding in a release of another package for the hooks of vLLM's overlay.

    Args:
        release: The release of the other package, paired with vLLM's release of the same number.
        product: The other package's product.
        own: The places that the other package's overlay hooks; None takes them from its lock.
        tree: Its sources; None opens those of the package index.
    """
    hooks = hooks_of_release(paired(release), UCM)
    own = hooks_of_release(release, product) if own is None else own  # an overlay may hook nothing
    rewritten = {path for path, _ in hooks}
    tree = open_sources(release, package=product.package) if tree is None else tree
    return [_fate(one, rewritten, hooks, own) for one in rebindings(tree, UCM.package.name, product.package.rebinds)]


def check_hooks_survive(overlay: Overlay, tree: SourceTree) -> None:
    """Refuse an overlay of a package that replaces functions of vLLM with hooks by others that have none.

    Args:
        overlay: The overlay.
        tree: The sources that it was made of.

    Raises:
        LostHooksError: Naming each replacement and the rules that it takes away.
    """
    own = hooks_of_outcomes(overlay.outcomes, overlay.product)
    lost = [fate for fate in fates(overlay.release, overlay.product, own, tree) if fate.lost]
    if lost:
        told = [
            f"{fate.rebinding.path}: {fate.rebinding.dotted} = {fate.rebinding.by}, which has "
            f"nothing in place of {', '.join(fate.lost)}"
            for fate in lost
        ]
        raise LostHooksError(
            f"{overlay.title} takes hooks away from vLLM {paired(overlay.release)}:\n    " + "\n    ".join(told),
            where=str(overlay.directory),
            fix="add a transform that inserts them into the replacement (CONTRIBUTING.md, 'Add a transform')",
        )


def pair(release: str) -> str:
    """Return the vLLM release of the same number, without a suffix such as ``rc2`` or ``.post1``."""
    return Version(release).base_version


def paired(release: str) -> str:
    """Return the `pair` of a release, whose overlay has been reviewed.

    Raises:
        OverlayError: If its overlay has not been reviewed.
    """
    number = pair(release)
    if number not in UCM.reviewed():
        raise OverlayError(
            f"release {release} pairs with vLLM {number}, whose overlay has not been reviewed",
            where=str(UCM.directory(number)),
            fix=f"review it first: `nox -s review -- {number}`",
        )
    return number


def _fate(one: Rebinding, rewritten: set[str], hooks: Hooks, own: Hooks) -> Fate:
    path, name = one.place[0], one.reach
    within = {scope: rules for (where, scope), rules in hooks.items() if where == path and _is_in(scope, name)}
    hooked = tuple(sorted({rule for rules in within.values() for rule in rules}))
    if not hooked:
        return Fate(one, path in rewritten, (), survives=True, serves="")
    if one.kind is Kind.WRAPPER:
        return Fate(one, rewritten=True, hooked=hooked, survives=True, serves="the hooked function runs inside it")
    replaced = within
    overrides = {method: (file, by) for method, file, by in one.overrides}
    if one.kind is Kind.SUBCLASS:
        replaced = {scope: rules for scope, rules in within.items() if scope.removeprefix(f"{name}.") in overrides}
    instead: set[str] = set()
    lost: set[str] = set()
    for scope, rules in replaced.items():
        file, method = overrides.get(scope.removeprefix(f"{name}."), (one.defined_in or one.path, ""))
        method = method or _counterpart(one, scope)
        ours = {rule for (at, there), found in own.items() if at == file and _is_in(there, method) for rule in found}
        instead |= ours
        lost |= {rule for rule in rules if _what(rule) not in set(map(_what, ours))}
    serves = ", ".join(sorted(instead))
    if one.kind is Kind.SUBCLASS:
        serves = f"inherited; what it overrides has {serves}" if serves else "inherited"
    if lost:
        told = f"{NOTHING} has {', '.join(sorted(lost))}: a feature that needs it is refused by name when it starts"
        serves = f"{serves}; {told}" if instead else told
    survives = one.kind is Kind.SUBCLASS and not lost
    return Fate(one, rewritten=True, hooked=hooked, survives=survives, serves=serves, lost=tuple(sorted(lost)))


def _counterpart(one: Rebinding, scope: str) -> str:
    """Return the qualified name, in the replacement's file, of what runs in place of a function of the original."""
    if not one.name:
        return scope
    return one.by if one.reach != one.name else one.by + scope.removeprefix(one.name)


def _is_in(scope: str, name: str) -> bool:
    """Return whether a function is, or is in, what a name stands for; no name stands for a whole module."""
    return not name or scope == name or scope.startswith(f"{name}.")


def _what(rule: str) -> str:
    """Return the last part of a rule's id; rules of two owners that do the same have the same one."""
    return rule.rpartition(".")[2]


def _of_file(files: _Files, path: str, package: str) -> Iterator[Rebinding]:
    nodes = files.nodes(path)
    names = _imported(nodes, package)
    kept = _originals(nodes, names)
    texts = _texts(nodes)
    modules = _module_names(nodes)
    for node in nodes:
        for module, value in _replaced_modules(node, texts, package):
            source = f"{modules.get(_name(value), '').replace('.', '/')}.py"
            yield Rebinding(module, "", Kind.COPY, _name(value), path, source)
        for target, value in _assignments(node, texts):
            dotted = _resolved(target, names)
            if dotted is None or "." not in dotted:
                continue
            module, name = _split(dotted)
            if name:
                where, replacement = _replacement(value, files, path)
                kind = _kind(replacement, kept, dotted)
                overrides: tuple[tuple[str, str, str], ...] = ()
                if isinstance(replacement, ast.ClassDef):
                    derived, methods = _derived(files, where, replacement, dotted.rpartition(".")[2], kept)
                    if derived:
                        kind, overrides = Kind.SUBCLASS, tuple(methods.values())
                yield Rebinding(module, name, kind, _name(value), path, where, overrides)


def _texts(nodes: Sequence[ast.AST]) -> dict[str, list[str]]:
    """Return the texts that a file's names stand for: constants, and the variables of loops over literals."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.For):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            given = [node.value] if isinstance(node, ast.Assign) else getattr(node.iter, "elts", [])
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).extend(
                    one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else COMPUTED
                    for one in given or [node]
                )
    return found


def _texts_of(node: ast.expr, texts: Mapping[str, list[str]]) -> list[str]:
    """Return the texts that an expression can stand for; `COMPUTED` for one that cannot be read from the source."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    return texts.get(node.id, [COMPUTED]) if isinstance(node, ast.Name) else [COMPUTED]


def _module_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Return the dotted name that each imported name of a file would have as a module."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.rpartition(".")[2]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _replaced_modules(node: ast.AST, texts: Mapping[str, list[str]], package: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the package's modules that a node replaces in ``sys.modules``, each with what takes its place."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        pairs = [
            (target.slice, node.value)
            for target in node.targets
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) in {"sys.modules", "modules"}
        ]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if ast.unparse(node.func) in {"sys.modules.__setitem__", "sys.modules.setdefault"} and len(node.args) > 1:
            pairs = [(node.args[0], node.args[1])]
        elif ast.unparse(node.func) == "sys.modules.update" and node.args and isinstance(node.args[0], ast.Dict):
            pairs = [(key, value) for key, value in zip(node.args[0].keys, node.args[0].values, strict=True) if key]
    for key, value in pairs:
        yield from ((name, value) for name in _texts_of(key, texts) if name.partition(".")[0] == package)


def _assignments(node: ast.AST, texts: Mapping[str, list[str]]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes that a node assigns, also by ``setattr``, each with its value."""
    if isinstance(node, ast.Assign):
        yield from (pair for target in node.targets for pair in _targets(target, node.value))
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _targets(node.target, node.value)
    elif isinstance(node, ast.Call) and _name(node.func) in SETTERS and len(node.args) >= 3:  # noqa: PLR2004 - setattr
        holder, name, value = node.args[-3:]
        yield from ((ast.Attribute(holder, text, ast.Store()), value) for text in _texts_of(name, texts))


def _targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes of an assignment's target, also of one like ``a.x, a.y = f, g``."""
    if isinstance(target, ast.Attribute):
        yield target, value
    elif isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else None
        for one, given in zip(target.elts, parts or [value] * len(target.elts), strict=True):
            yield from _targets(one, given)


def _imported(nodes: Sequence[ast.AST], package: str) -> dict[str, str]:
    """Return the dotted name that each of a file's names for things in the package refers to."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == package:
                    found[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:  # aliases
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            dotted = _resolved(node.value, found) or _loaded(node.value, package)
            if dotted:
                found.setdefault(node.targets[0].id, dotted)
    return found


def _loaded(node: ast.expr, package: str) -> str | None:
    """Return the module of the package that ``sys.modules.get("...")`` returns, or None."""
    if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "sys.modules.get"):
        return None
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return name if isinstance(name, str) and name.partition(".")[0] == package else None


def _originals(nodes: Sequence[ast.AST], names: dict[str, str]) -> dict[str, str]:
    """Return the names under which a file keeps the originals, each with the original's dotted name."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute):
            dotted = _resolved(node.value, names)
            if dotted:
                found[_name(node.targets[0])] = dotted
    return found


def _resolved(node: ast.expr, names: dict[str, str]) -> str | None:
    """Return the dotted name that an expression refers to, or None if it is not in the package."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        holder = _resolved(node.value, names)
        return f"{holder}.{node.attr}" if holder else None
    return None


def _split(dotted: str) -> tuple[str, str]:
    """Split a dotted name into module and qualified name: class names start with a capital, module names never do."""
    parts = dotted.split(".")
    first = next((n for n, part in enumerate(parts) if part[:1].isupper() or part.startswith("_")), len(parts) - 1)
    return ".".join(parts[:first]), ".".join(parts[first:])


def _replacement(value: ast.expr, files: _Files, path: str) -> tuple[str, Definition | None]:
    """Return the function or class that is assigned, also one that a call wraps, and the file that defines it."""
    found = files.definition(path, _name(value))
    if found[1] is not None or not isinstance(value, ast.Call):
        return found
    arguments = (files.definition(path, _name(argument)) for argument in value.args)
    return next((wrapped for wrapped in arguments if wrapped[1] is not None), found)


def _kind(node: Definition | None, kept: dict[str, str], dotted: str) -> Kind:
    if node is None:
        return Kind.VALUE
    if isinstance(node, ast.ClassDef):
        return Kind.COPY
    return Kind.WRAPPER if _calls(node, {name for name, of in kept.items() if of == dotted}) else Kind.COPY


def _calls(function: ast.AST, originals: set[str]) -> bool:
    """Return whether a function calls one of some others, also under a name of its own; a mention is no call."""
    nodes = list(ast.walk(function))
    own = {
        _name(target)
        for node in nodes
        if isinstance(node, ast.Assign) and any(_name(part) in originals for part in ast.walk(node.value))
        for target in node.targets
    }
    return any(_name(node.func) in originals | own for node in nodes if isinstance(node, ast.Call))


def _derived(
    files: _Files, path: str, node: ast.ClassDef, original: str, kept: Mapping[str, str]
) -> tuple[bool, dict[str, tuple[str, str, str]]]:
    """Return whether a class derives from an original, and what it overrides, also through bases in the package.

    Args:
        files: The package.
        path: The file of the class.
        node: The class.
        original: The last part of the original's name.
        kept: The names under which the file that rebinds keeps originals.
    """
    bases = [_name(base) for base in node.bases]
    derives = any(kept.get(base, base).rpartition(".")[2] == original for base in bases)
    found: dict[str, tuple[str, str, str]] = {}
    for base in bases:
        where, of = files.definition(path, base)
        if isinstance(of, ast.ClassDef) and of is not node:
            further, inherited = _derived(files, where, of, original, kept)
            derives = derives or further
            found = inherited | found
    methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    own = {m.name: (m.name, path, f"{node.name}.{m.name}") for m in methods if not _calls_base(m, set(bases))}
    return derives, found | own


def _calls_base(method: ast.FunctionDef | ast.AsyncFunctionDef, bases: set[str]) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == method.name
        and (_name(node.value) == "super" or (isinstance(node.value, ast.Name) and node.value.id in bases))
        for node in ast.walk(method)
    )


def _name(node: ast.AST) -> str:
    """Return the last part of a name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return _name(node.func) if isinstance(node, ast.Call) else ""
