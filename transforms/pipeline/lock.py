"""The lock: the record of a reviewed overlay. Builds produce nothing else.

For each module, ``overlays/vllm-X/lock.json`` lists the hashes of the upstream and the rewritten file, and the rules;
``changes.diff`` beside it contains the change itself. Only `accept` writes them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

from transforms.engine.errors import OverlayError
from transforms.engine.marks import marked_lines
from transforms.engine.report import Status
from transforms.pipeline.conflicts import conflicts
from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.product import UCM
from transforms.pipeline.sources.tree import sha256
from transforms.place import IS_CHECKOUT, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.report import Outcome
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay, RewrittenModule

SCHEMA = 1
PARTS = ("release", "serial", "upstream", "modules", "not_inserted")
RESTORE = "restore it with git checkout"
#: An object that holds no other, with at most one list.
INNERMOST = re.compile(r"\{[^{}\[\]]*(\[[^{}\[\]]*\])?[^{}\[\]]*\}")
#: A line break of the layout; in a string it would be escaped.
INDENT = re.compile(r"\n *")

Lock = dict[str, Any]


class LockError(OverlayError):
    """An overlay differs from its lock, or has none."""


def make_lock(overlay: Overlay, serial: int) -> Lock:
    """Return the lock of an overlay.

    Args:
        overlay: The overlay.
        serial: The number of this overlay among those published for the release; the wheel's post-release number.
    """
    meeting = {"owners": list(overlay.product.owners), "conflicts": conflicts(overlay)}
    unchanged = [o for o in overlay.outcomes if o.status in {Status.NOT_APPLICABLE, Status.UPSTREAMED}]
    return {
        "schema": SCHEMA,
        "release": overlay.release,
        "serial": serial,
        "upstream": {
            "kind": overlay.artefact.kind,
            "name": overlay.artefact.name,
            "sha256": overlay.artefact.sha256,
        },
        **(meeting if overlay.product.others else {}),
        "modules": [_module(module) for module in overlay.modules],
        "not_inserted": [{"rule": o.rule, "status": o.status.value, "reason": o.detail} for o in unchanged],
    }


def _module(module: RewrittenModule) -> dict[str, Any]:
    lines = marked_lines(module.rewritten)
    return {
        "name": module.name,
        "path": module.path,
        "group": module.group,
        "upstream_sha256": sha256(module.upstream),
        "rewritten_sha256": sha256(module.rewritten),
        "default_sha256": None if module.default is None else sha256(module.default),
        "rules": [_rule(o, lines, module.opt_in) for o in module.outcomes if o.status is Status.APPLIED],
    }


def _rule(outcome: Outcome, lines: dict[str, list[int]], opt_in: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"id": outcome.rule, "hits": outcome.hits}
    if outcome.rule in opt_in:
        found["opt_in"] = True
    if outcome.variant:
        found["variant"] = outcome.variant
    if outcome.rule in lines:
        found["lines"] = lines[outcome.rule]
    return found


def built_lock(lock: Lock, *, all_hooks: bool) -> Lock:
    """Return the part of a lock that a wheel contains.

    Args:
        lock: The overlay's lock.
        all_hooks: Whether the wheel also contains the opt-in rules.
    """
    if all_hooks:
        return lock
    modules = [
        {**m, "rewritten_sha256": m["default_sha256"], "rules": [r for r in m["rules"] if not r.get("opt_in")]}
        for m in lock["modules"]
        if m["default_sha256"] is not None
    ]
    return {**lock, "modules": modules}


def read_lock(release: str, product: Product = UCM) -> Lock | None:
    """Return the reviewed lock of a release, or None.

    Raises:
        LockError: If it cannot be read.
    """
    path = product.directory(release) / "lock.json"
    try:
        lock = cast("Lock", json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LockError("a lock is not JSON", where=f"{path}: {error}", fix=RESTORE) from error
    if not isinstance(lock, dict):
        raise LockError("a lock is damaged", where=f"{path}: it is no object", fix=RESTORE)
    if lock.get("schema") != SCHEMA:
        raise LockError(
            f"a lock has schema {lock.get('schema')}, and this is the code for {SCHEMA}",
            where=str(path),
            fix="use the checkout that wrote it, or review the release again",
        )
    missing = [part for part in PARTS if part not in lock]
    if missing:
        raise LockError("a lock is damaged", where=f"{path}: it lacks {', '.join(missing)}", fix=RESTORE)
    return lock


def check_reviewed(overlay: Overlay, origin: str | None = None) -> Lock:
    """Return the reviewed lock of an overlay, if it matches exactly.

    Args:
        overlay: The overlay that was made.
        origin: Where its sources came from, for the error message.

    Raises:
        LockError: If there is none, or it differs; the message lists the differences and how to review them.
    """
    review = f"nox -s review -- {overlay.named}" + (f" --from {origin}" if origin else "")
    lock = read_lock(overlay.release, overlay.product)
    if lock is None:
        raise LockError(
            f"the overlay of {overlay.title} has not been reviewed",
            where=str(overlay.directory),
            fix=f"read it with `{review}`, then accept it with `{review} --accept`",
        )
    differences = compare(lock, make_lock(overlay, lock["serial"]))
    if not differences and not _has_diff(overlay):
        differences = ["changes.diff is not the diff of these modules"]
    if differences:
        raise LockError(
            f"the overlay of {overlay.title} is not the one that was reviewed:\n    " + "\n    ".join(differences),
            where=str(overlay.directory),
            fix=f"read the change with `{review}`, then accept it with `{review} --accept`",
        )
    return lock


def _has_diff(overlay: Overlay) -> bool:
    path = overlay.directory / "changes.diff"
    return path.is_file() and path.read_bytes() == overlay_diff(overlay).encode()


def compare(reviewed: Lock, made: Lock) -> list[str]:
    """Describe the differences between two locks; the origin of the sources does not count."""
    was, now = ({m["path"]: m for m in lock["modules"]} for lock in (reviewed, made))
    found = [f"{path}: no longer rewritten" for path in was.keys() - now.keys()]
    found += [f"{path}: rewritten, but was not before" for path in now.keys() - was.keys()]
    for path in sorted(was.keys() & now.keys()):
        if was[path]["upstream_sha256"] != now[path]["upstream_sha256"]:
            found.append(f"{path}: the upstream file has changed")
        elif was[path] != now[path]:
            found.append(f"{path}: the same upstream file is rewritten differently")
    if not found and reviewed["not_inserted"] != made["not_inserted"]:
        found.append("other rules are not applicable or upstreamed than before")
    if not found and reviewed.get("conflicts") != made.get("conflicts"):
        found.append("the conflicts between rules of several owners have changed")
    return sorted(found)


def accept(overlay: Overlay) -> Path:
    """Write the lock and the diff of a reviewed overlay; builds use them from now on.

    Returns:
        The overlay's directory.

    Raises:
        LockError: If it would replace the lock of a published vLLM with that of a modified one, or one of the tooling.
    """
    check_not_shipped(overlay.directory)
    for path, text in accepted_files(overlay).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return overlay.directory


def check_not_shipped(path: Path) -> None:
    """Refuse to write into the wheel of the tooling.

    Raises:
        LockError: If the path is in it.
    """
    if not IS_CHECKOUT and path.is_relative_to(ROOT):
        raise LockError(
            "UCM's own overlays are part of the tooling, which is not changed",
            where=str(path),
            fix="do this in a checkout of UCM's repository, or write rules of your own with `init`",
        )


def accepted_files(overlay: Overlay) -> dict[Path, str]:
    """Return the files that `accept` writes.

    If a module's rewritten content differs from the previous lock, the serial is increased, so that two different
    wheels never have the same version.

    Raises:
        LockError: As `accept`.
    """
    before = read_lock(overlay.release, overlay.product)
    lock = make_lock(overlay, before["serial"] if before else 1)
    if before:
        _check_same_upstream(before, lock, overlay)
        if _contents(before, "upstream_sha256") == _contents(lock, "upstream_sha256"):
            lock["upstream"] = before["upstream"]  # the same content from elsewhere: keep the published archive's name
        if any(_contents(before, which) != _contents(lock, which) for which in ("rewritten_sha256", "default_sha256")):
            lock["serial"] += 1
    target = overlay.directory
    return {target / "lock.json": dump(lock), target / "changes.diff": overlay_diff(overlay)}


def _contents(lock: Lock, which: str) -> dict[str, str | None]:
    return {module["path"]: module.get(which) for module in lock["modules"]}


def _check_same_upstream(before: Lock, lock: Lock, overlay: Overlay) -> None:
    """Refuse to replace the lock of a published archive with that of modified local sources."""
    was, now = _contents(before, "upstream_sha256"), _contents(lock, "upstream_sha256")
    changed = [path for path in was.keys() & now.keys() if was[path] != now[path]]
    if changed and before["upstream"]["sha256"] and not lock["upstream"]["sha256"]:
        raise LockError(
            f"these sources of {overlay.title} are not the published ones, whose overlay is in this place:\n    "
            + "\n    ".join(sorted(changed)),
            where=str(overlay.directory),
            fix=f"give your own {overlay.product.package.title} a name of its own: --release {overlay.release}+mine "
            "--from …",
        )


def dump(data: Lock) -> str:
    """Serialise a lock as JSON with one line per rule: readable in a diff, identical on every machine."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return INNERMOST.sub(lambda found: INDENT.sub(" ", found[0]), text) + "\n"
