"""Keep checked results of rewriting a module, each under a hash of everything that it depends on.

Parsing and printing a module takes most of a build. The hash covers the module's source, its rules, the release, the
hooks that the inserted calls use, and the code of the engine, the checks and LibCST, so a result is used again only
where it would be the same. The results lie beside the cache of upstream files; deleting them only costs time.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
import sys
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transforms.engine.report import Candidate, Outcome, Status
from transforms.pipeline.rewrite import RewrittenModule
from transforms.pipeline.sources.cache import Cache
from transforms.pipeline.sources.tree import SourceError, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transforms.engine.transform import Transform
    from transforms.pipeline.product import Product

#: The code that decides about a result, beside the rules themselves.
CODE = ("engine/*.py", "pipeline/rewrite.py", "pipeline/checks.py", "pipeline/results.py")
ENGINE = "transforms.engine."
#: How many versions of that code keep their results: branches that are worked on in turn should not lose theirs.
VERSIONS = 4


class Results:
    """The kept results of one product and release.

    Args:
        product: The package and the rules.
        release: The release.
        cache: The cache of upstream files; the user's by default.
    """

    def __init__(self, product: Product, release: str, cache: Cache | None = None) -> None:
        self._cache = cache or Cache()
        forms = [form for one in product.transforms for rule in one.rules for form in rule.variants]
        # The code of an edit or a scope that somebody else wrote is not part of the hash.
        self._known = all(
            type(part).__module__.startswith(ENGINE) for form in forms for part in (form.scope, form.edit)
        )
        seams = [one.hooks.read_text(encoding="utf-8") for one in product.registries]
        self._common = json.dumps([product.publisher.title, product.package.title, release, *seams])
        self._files: dict[str, Path] = {}
        #: The paths of the modules whose result was found; they passed the checks before they were kept.
        self.found: set[str] = set()

    def get(self, transforms: Sequence[Transform], path: str, source: bytes) -> RewrittenModule | None:
        """Return a module as it was rewritten before, or None.

        Args:
            transforms: The transforms of the module.
            path: Its path in the release.
            source: Its upstream source.
        """
        # A dataclass shows all its fields, and rules consist of dataclasses, strings and numbers.
        parts = (self._common, path, sha256(source), *map(repr, transforms))
        file = self._files[path] = self._cache.root / "results" / _code() / sha256("\0".join(parts).encode())
        if not self._known:
            return None
        try:
            data = json.loads(zlib.decompress(file.read_bytes()))
            outcomes = tuple(map(_outcome, data["outcomes"]))
            changing = tuple(one for one in transforms if one.id in data["changing"])
            default = None if data["default"] is None else data["default"].encode("latin-1")
            rewritten, opt_in = data["rewritten"].encode("latin-1"), tuple(data["opt_in"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zlib.error):
            return None
        self.found.add(path)
        return RewrittenModule(changing, path, source, rewritten, outcomes, default, opt_in)

    def keep(self, modules: Iterable[RewrittenModule]) -> None:
        """Keep modules that passed the checks. A cache that cannot be written is left as it is."""
        for module in modules:
            if not self._known or module.path in self.found:
                continue
            data = {  # bytes as text: a module may be in any encoding
                "changing": [transform.id for transform in module.transforms],
                "rewritten": module.rewritten.decode("latin-1"),
                "default": None if module.default is None else module.default.decode("latin-1"),
                "opt_in": module.opt_in,
                "outcomes": [{**asdict(one), "status": one.status.value} for one in module.outcomes],
            }
            file = self._files[module.path]
            try:
                if not file.parent.exists():
                    _drop_old(file.parents[1])
                self._cache.write(file, zlib.compress(json.dumps(data).encode(), 1))
            except (OSError, SourceError):
                return


def _outcome(data: dict[str, Any]) -> Outcome:
    candidates = tuple(Candidate(**one) for one in data["candidates"])
    return Outcome(**{**data, "status": Status(data["status"]), "candidates": candidates})


@functools.cache
def _code() -> str:
    """Return the hash of the code that decides about results, with the versions of Python and LibCST."""
    root = Path(__file__).parents[1]
    files = sorted({file for pattern in CODE for file in root.glob(pattern)})
    parts = [sys.version, importlib.metadata.version("libcst"), *(file.read_text(encoding="utf-8") for file in files)]
    return sha256("\0".join(parts).encode())


def _drop_old(results: Path) -> None:
    """Delete the results of all versions of the code but the last ones."""
    versions = sorted(results.iterdir(), key=lambda path: path.stat().st_mtime) if results.is_dir() else []
    for path in versions[: -(VERSIONS - 1)]:
        shutil.rmtree(path, ignore_errors=True)
