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
from transforms.pipeline.census import hooks_of_release
from transforms.pipeline.pages import templates
from transforms.pipeline.product import UCM
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.pipeline.census import Hooks
    from transforms.pipeline.product import Product
    from transforms.pipeline.sources.tree import SourceTree


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NOTHING = "nothing"
TEMPLATE = "rebindings.md.j2"


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
        name: The attribute's qualified name in it.
        kind: The kind of the replacement.
        by: The replacement's name in ``path``.
        path: The file with the assignment.
    """

    module: str
    name: str
    kind: Kind
    by: str
    path: str

    @property
    def place(self) -> tuple[str, str]:
        """The file and the qualified name of the rebound attribute."""
        return f"{self.module.replace('.', '/')}.py", self.name


@dataclass(frozen=True)
class Fate:
    """A rebinding, and its consequence for the overlay of the rebound package.

    Attributes:
        rebinding: The rebinding.
        rewritten: Whether the overlay rewrites the module.
        hooked: The rules whose insertions are in the function, or in methods of the class.
        survives: Whether their calls still happen.
        serves: What makes the calls instead; empty if nothing has to.
    """

    rebinding: Rebinding
    rewritten: bool
    hooked: tuple[str, ...]
    survives: bool
    serves: str


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
        return [fate for fate in self.hooked if not fate.survives and not fate.serves.startswith(NOTHING)]

    @property
    def lost(self) -> list[Fate]:
        """The rebindings that remove hooks without a substitute."""
        return [fate for fate in self.hooked if not fate.survives and fate.serves.startswith(NOTHING)]

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
    for path in sorted(path for path in tree.python_files() if path.startswith(within)):
        found += _of_file(ast.parse(tree.read(path)), path, package)
    return list({(one.module, one.name, one.path): one for one in found}.values())


def fates(release: str, product: Product) -> list[Fate]:
    """Return the consequence of each rebinding in a release of another package for the hooks of vLLM's overlay.

    Args:
        release: The release of the other package, paired with vLLM's release of the same number.
        product: The other package's product.
    """
    hooks, own = hooks_of_release(paired(release), UCM), hooks_of_release(release, product)
    rewritten = {path for path, _ in hooks}
    tree = open_sources(release, package=product.package)
    return [_fate(one, rewritten, hooks, own) for one in rebindings(tree, UCM.package.name, product.package.rebinds)]


def paired(release: str) -> str:
    """Return the vLLM release of the same number, without a suffix such as ``rc2`` or ``.post1``.

    Raises:
        OverlayError: If its overlay has not been reviewed.
    """
    number = Version(release).base_version
    if number not in UCM.reviewed():
        raise OverlayError(
            f"release {release} pairs with vLLM {number}, whose overlay has not been reviewed",
            where=str(UCM.directory(number)),
            fix=f"review it first: `nox -s review -- {number}`",
        )
    return number


def _fate(one: Rebinding, rewritten: set[str], hooks: Hooks, own: Hooks) -> Fate:
    path, name = one.place
    hooked = sorted(
        {
            rule
            for (where, scope), rules in hooks.items()
            if where == path and (scope == name or scope.startswith(f"{name}."))
            for rule in rules
        }
    )
    if not hooked:
        return Fate(one, path in rewritten, (), True, "")
    if one.kind is Kind.WRAPPER:
        return Fate(one, True, tuple(hooked), True, "the hooked function runs inside it")
    instead = sorted(
        {
            rule
            for (where, scope), rules in own.items()
            if where == one.path and scope.startswith(one.by)
            for rule in rules
        }
    )
    if one.kind is Kind.SUBCLASS:
        serves = f"inherited; what it overrides has {', '.join(instead)}" if instead else "inherited"
        return Fate(one, True, tuple(hooked), True, serves)
    serves = ", ".join(instead) or f"{NOTHING}: a feature that needs it is refused by name when it starts"
    return Fate(one, True, tuple(hooked), False, serves)


def _of_file(tree: ast.Module, path: str, package: str) -> Iterator[Rebinding]:
    names = _imported(tree, package)
    defined = {n.name: n for n in ast.walk(tree) if isinstance(n, Definition)}
    kept = _originals(tree, names)
    for node in ast.walk(tree):
        for target, value in _assignments(node):
            dotted = _resolved(target, names)
            if dotted is None or "." not in dotted:
                continue
            module, name = _split(dotted)
            if name:
                yield Rebinding(module, name, _kind(value, defined, kept, dotted), _name(value), path)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes that a node assigns, also by ``setattr`` with a literal name, each with its value."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets if isinstance(target, ast.Attribute))
    elif isinstance(node, ast.Call) and _name(node.func) == "setattr" and len(node.args) == 3:  # noqa: PLR2004 - setattr
        holder, name, value = node.args
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield ast.Attribute(holder, name.value, ast.Store()), value


def _imported(tree: ast.Module, package: str) -> dict[str, str]:
    """Return the dotted name that each of a file's names for things in the package refers to."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == package:
                    found[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):  # aliases
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


def _originals(tree: ast.Module, names: dict[str, str]) -> dict[str, str]:
    """Return the names under which a file keeps the originals, each with the original's dotted name."""
    found = {}
    for node in ast.walk(tree):
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


def _kind(value: ast.expr, defined: dict[str, Definition], kept: dict[str, str], dotted: str) -> Kind:
    node = defined.get(_name(value))
    if isinstance(value, ast.Call) and node is None:
        inner = [defined[_name(argument)] for argument in value.args if _name(argument) in defined]
        node = inner[0] if inner else defined.get(_name(value.func))
    if isinstance(node, ast.ClassDef):
        bases = {_name(base) for base in node.bases}
        last = dotted.rpartition(".")[2]
        return Kind.SUBCLASS if any(kept.get(base, base).rpartition(".")[2] == last for base in bases) else Kind.COPY
    if node is None:
        return Kind.VALUE
    used = {_name(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
    return Kind.WRAPPER if any(kept.get(name) == dotted for name in used) else Kind.COPY


def _name(node: ast.AST) -> str:
    """Return the last part of a name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return _name(node.func) if isinstance(node, ast.Call) else ""
