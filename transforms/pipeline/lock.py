"""The lock: what was reviewed of an overlay, so that nothing else is ever built.

``overlays/vllm-X/lock.json`` says, per module, which upstream content becomes which rewritten content by which rules;
``changes.diff`` beside it is the change itself. Both are written by `accept` alone.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from packaging.version import Version

from transforms.engine.errors import OverlayError
from transforms.engine.marks import MARK
from transforms.engine.report import Status
from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.sources.tree import sha256

if TYPE_CHECKING:
    from transforms.engine.report import Outcome
    from transforms.pipeline.rewrite import Overlay, RewrittenModule

OVERLAYS = Path(__file__).parents[2] / "overlays"
SCHEMA = 1
PARTS = ("release", "serial", "upstream", "modules", "not_inserted")
RESTORE = "restore it with git checkout"
#: An object that holds no other, with at most one list.
INNERMOST = re.compile(r"\{[^{}\[\]]*(\[[^{}\[\]]*\])?[^{}\[\]]*\}")
#: A line break of the layout; in a string it would be escaped.
INDENT = re.compile(r"\n *")

Lock = dict[str, Any]


class LockError(OverlayError):
    """An overlay is not what was reviewed, or was not reviewed at all."""


def make_lock(overlay: Overlay, serial: int) -> Lock:
    """The lock of an overlay.

    Args:
        overlay: The overlay.
        serial: Our count of published overlays for the release; it is the wheel's post-release number.
    """
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
        "rules": [_rule(o, lines) for o in module.outcomes if o.status is Status.APPLIED],
    }


def _rule(outcome: Outcome, lines: dict[str, list[int]]) -> dict[str, Any]:
    found: dict[str, Any] = {"id": outcome.rule, "hits": outcome.hits}
    if outcome.variant:
        found["variant"] = outcome.variant
    if outcome.rule in lines:
        found["lines"] = lines[outcome.rule]
    return found


def marked_lines(rewritten: bytes) -> dict[str, list[int]]:
    """The lines of a rewritten module that carry each rule's mark."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(io.StringIO(rewritten.decode(), newline="\n"), 1):
        _, mark, rule = line.partition(MARK)
        if mark:
            found.setdefault(rule.strip(), []).append(number)
    return found


def directory(release: str, overlays: Path = OVERLAYS) -> Path:
    """Where a release's reviewed overlay lies."""
    return overlays / f"vllm-{release}"


def reviewed_releases(overlays: Path = OVERLAYS) -> list[str]:
    """The releases with a lock, oldest first."""
    names = (path.parent.name.removeprefix("vllm-") for path in overlays.glob("vllm-*/lock.json"))
    return sorted(names, key=Version)


def read_lock(release: str, overlays: Path = OVERLAYS) -> Lock | None:
    """The reviewed lock of a release, or None.

    Raises:
        LockError: If it cannot be read.
    """
    path = directory(release, overlays) / "lock.json"
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


def check_reviewed(overlay: Overlay, overlays: Path = OVERLAYS, origin: str | None = None) -> Lock:
    """The reviewed lock of exactly this overlay.

    Args:
        overlay: The overlay that was made.
        overlays: The directory of all reviewed overlays.
        origin: Where its sources came from, for the way out that the message names.

    Raises:
        LockError: If there is none, or it differs; the message lists what differs and how to review it.
    """
    release = overlay.release
    review = f"nox -s review -- {release}" + (f" --from {origin}" if origin else "")
    lock = read_lock(release, overlays)
    if lock is None:
        raise LockError(
            f"the overlay of vLLM {release} has not been reviewed",
            where=str(directory(release, overlays)),
            fix=f"read it with `{review}`, then accept it with `{review} --accept`",
        )
    differences = compare(lock, make_lock(overlay, lock["serial"]))
    if not differences and not _has_diff(overlay, overlays):
        differences = ["changes.diff is not the diff of these modules"]
    if differences:
        raise LockError(
            f"the overlay of vLLM {release} is not the one that was reviewed:\n    " + "\n    ".join(differences),
            where=str(directory(release, overlays)),
            fix=f"read the change with `{review}`, then accept it with `{review} --accept`",
        )
    return lock


def _has_diff(overlay: Overlay, overlays: Path) -> bool:
    path = directory(overlay.release, overlays) / "changes.diff"
    return path.is_file() and path.read_bytes() == overlay_diff(overlay).encode()


def compare(reviewed: Lock, made: Lock) -> list[str]:
    """What differs between two locks, for a person; where the sources were read from does not count."""
    was, now = ({m["path"]: m for m in lock["modules"]} for lock in (reviewed, made))
    found = [f"{path}: no longer rewritten" for path in was.keys() - now.keys()]
    found += [f"{path}: rewritten, and was not" for path in now.keys() - was.keys()]
    for path in sorted(was.keys() & now.keys()):
        if was[path]["upstream_sha256"] != now[path]["upstream_sha256"]:
            found.append(f"{path}: the upstream file is another")
        elif was[path] != now[path]:
            found.append(f"{path}: the same upstream file is rewritten differently")
    if not found and reviewed["not_inserted"] != made["not_inserted"]:
        found.append("the rules that are not applicable or upstreamed are others")
    return sorted(found)


def accept(overlay: Overlay, overlays: Path = OVERLAYS) -> Path:
    """Write the lock and the diff of an overlay: it was read, and is to be built from now on.

    Returns:
        The overlay's directory.

    Raises:
        LockError: If it would put one's own vLLM in the place of the published one's.
    """
    for path, text in accepted_files(overlay, overlays).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory(overlay.release, overlays)


def accepted_files(overlay: Overlay, overlays: Path = OVERLAYS) -> dict[Path, str]:
    """What `accept` writes.

    The serial, our count of overlays for the release, rises by itself when a module is rewritten differently than in
    the lock before: no two different wheels have one version.

    Raises:
        LockError: As `accept`.
    """
    before = read_lock(overlay.release, overlays)
    lock = make_lock(overlay, before["serial"] if before else 1)
    if before:
        _check_same_upstream(before, lock, directory(overlay.release, overlays))
        if _contents(before, "upstream_sha256") == _contents(lock, "upstream_sha256"):
            lock["upstream"] = before["upstream"]  # the same content from elsewhere: keep the published archive's name
        if _contents(before, "rewritten_sha256") != _contents(lock, "rewritten_sha256"):
            lock["serial"] += 1
    target = directory(overlay.release, overlays)
    return {target / "lock.json": dump(lock), target / "changes.diff": overlay_diff(overlay)}


def _contents(lock: Lock, which: str) -> dict[str, str]:
    return {module["path"]: module[which] for module in lock["modules"]}


def _check_same_upstream(before: Lock, lock: Lock, place: Path) -> None:
    """Refuse to put sources that are in no index in the place of a published archive's."""
    was, now = _contents(before, "upstream_sha256"), _contents(lock, "upstream_sha256")
    changed = [path for path in was.keys() & now.keys() if was[path] != now[path]]
    if changed and before["upstream"]["sha256"] and not lock["upstream"]["sha256"]:
        release = lock["release"]
        raise LockError(
            f"these sources of vLLM {release} are not the published ones, whose overlay is in this place:\n    "
            + "\n    ".join(sorted(changed)),
            where=str(place),
            fix=f"give your own vLLM a name of its own: --release {release}+mine --from …",
        )


def dump(data: Lock) -> str:
    """JSON as we keep it: readable in a diff, one line per rule, the same on every machine."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return INNERMOST.sub(lambda found: INDENT.sub(" ", found[0]), text) + "\n"
