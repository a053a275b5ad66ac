"""The lock: its content, differences from it, and the resulting messages."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ucm.overlay.miniature import RELEASE
from transforms.engine.marks import marked_lines
from transforms.engine.report import Outcome, Status
from transforms.pipeline.lock import (
    LockError,
    accept,
    check_reviewed,
    compare,
    dump,
    make_lock,
    read_lock,
)
from transforms.pipeline.product import UCM, Product
from transforms.pipeline.sources.tree import Artefact, sha256

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transforms.pipeline.lock import Lock
    from transforms.pipeline.rewrite import Overlay

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
SCHEDULER = "vllm/v1/core/sched/scheduler.py"


def changed(overlay: Overlay) -> Overlay:
    """Return the overlay with another first module."""
    first, *rest = overlay.modules
    return replace(overlay, modules=(replace(first, rewritten=b"import os\n"), *rest))


def shelf(overlays: Path) -> Product:
    """Return UCM's product with its locks in another directory."""
    return replace(UCM, overlays=overlays)


def kept(overlay: Overlay, overlays: Path) -> Overlay:
    """Return the overlay with its lock in another directory."""
    return replace(overlay, product=shelf(overlays))


def test_a_lock_says_what_becomes_of_each_module(overlay: Overlay) -> None:
    lock = make_lock(overlay, 3)
    assert (lock["release"], lock["serial"]) == (RELEASE, 3)
    for module, locked in zip(overlay.modules, lock["modules"], strict=True):
        assert locked["path"] == module.path
        assert locked["upstream_sha256"] == sha256(module.upstream)
        assert locked["rewritten_sha256"] == sha256(module.rewritten)
        lines = module.rewritten.decode().split("\n")
        for rule in locked["rules"]:
            assert all(lines[n - 1].endswith(f"# ucm: {rule['id']}") for n in rule.get("lines", []))
    inserted = {rule["id"] for module in lock["modules"] for rule in module["rules"]}
    left_out = {entry["rule"] for entry in lock["not_inserted"]}
    assert inserted | left_out | {"block_table.import"} == {o.rule for o in overlay.outcomes}
    assert all(entry["reason"] for entry in lock["not_inserted"])


def test_marked_lines_are_counted_as_git_counts_them() -> None:
    source = "a = '\x0c\u2028'\nb()  # ucm: t.rule\n\nc()  # ucm: t.rule\n".encode()
    assert marked_lines(source) == {"t.rule": [2, 4]}


def test_accept_and_check(overlay: Overlay, tmp_path: Path) -> None:
    target = accept(kept(overlay, tmp_path))
    assert target == shelf(tmp_path).directory(RELEASE)
    assert sorted(path.name for path in target.iterdir()) == ["changes.diff", "lock.json"]
    assert check_reviewed(kept(overlay, tmp_path)) == read_lock(RELEASE, shelf(tmp_path)) == make_lock(overlay, 1)
    assert shelf(tmp_path).reviewed() == [RELEASE]


def test_releases_are_in_the_order_of_their_versions(tmp_path: Path) -> None:
    for release in ("0.10.0", "0.9.2", "0.10.0rc1", "0.9.10"):
        (tmp_path / f"vllm-{release}").mkdir()
        (tmp_path / f"vllm-{release}" / "lock.json").touch()
    (tmp_path / "vllm-0.1.0").mkdir()
    assert shelf(tmp_path).reviewed() == ["0.9.2", "0.9.10", "0.10.0rc1", "0.10.0"]


@settings(deadline=None)
@given(JSON)
def test_what_is_written_is_what_is_read(data: object) -> None:
    lock = {"data": data, "rules": [{"id": "a", "lines": [1, 2]}]}
    assert json.loads(dump(lock)) == lock


def test_a_rule_stands_on_one_line() -> None:
    text = dump({"rules": [{"id": "a.b", "hits": 1, "lines": [4, 9]}, {"id": "a.c", "hits": 1}]})
    assert text == (
        '{\n "rules": [\n  { "id": "a.b", "hits": 1, "lines": [ 4, 9 ] },\n  { "id": "a.c", "hits": 1 }\n ]\n}\n'
    )


def test_an_overlay_that_was_not_reviewed(overlay: Overlay, tmp_path: Path) -> None:
    with pytest.raises(LockError) as caught:
        check_reviewed(kept(overlay, tmp_path))
    assert str(caught.value) == (
        f"the overlay of vLLM {RELEASE} has not been reviewed\n"
        f"  where: {tmp_path}/vllm-{RELEASE}\n"
        f"  to do: read it with `nox -s review -- {RELEASE}`, then accept it with `nox -s review -- {RELEASE} --accept`"
    )


def test_an_overlay_that_differs(overlay: Overlay, tmp_path: Path) -> None:
    accept(kept(changed(overlay), tmp_path))
    with pytest.raises(LockError) as caught:
        check_reviewed(kept(overlay, tmp_path))
    what, difference, where, fix = str(caught.value).splitlines()
    assert what == f"the overlay of vLLM {RELEASE} is not the one that was reviewed:"
    assert difference == f"    {SCHEDULER}: the same upstream file is rewritten differently"
    assert where == f"  where: {tmp_path}/vllm-{RELEASE}"
    assert fix.startswith(f"  to do: read the change with `nox -s review -- {RELEASE}`, then accept it with ")


def lose_module(lock: Lock) -> None:
    del lock["modules"][0]


def other_upstream(lock: Lock) -> None:
    lock["modules"][0]["upstream_sha256"] = "0" * 64


def other_rewritten(lock: Lock) -> None:
    lock["modules"][0]["rewritten_sha256"] = "0" * 64


def other_rule(lock: Lock) -> None:
    lock["modules"][0]["rules"][0]["hits"] = 2


def other_reason(lock: Lock) -> None:
    lock["not_inserted"][0]["reason"] = "it rained"


def other_source(lock: Lock) -> None:
    lock["upstream"] = {"kind": "wheel", "name": "vllm.whl", "sha256": "0" * 64}
    lock["serial"] = 7


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lose_module, [f"{SCHEDULER}: no longer rewritten"]),
        (other_upstream, [f"{SCHEDULER}: the upstream file has changed"]),
        (other_rewritten, [f"{SCHEDULER}: the same upstream file is rewritten differently"]),
        (other_rule, [f"{SCHEDULER}: the same upstream file is rewritten differently"]),
        (other_reason, ["other rules are not applicable or upstreamed than before"]),
        (other_source, []),
    ],
)
def test_what_differs(overlay: Overlay, change: Callable[[Lock], None], told: list[str]) -> None:
    reviewed = make_lock(overlay, 1)
    made = copy.deepcopy(reviewed)
    change(made)
    assert compare(reviewed, made) == told


def test_a_module_more_differs(overlay: Overlay) -> None:
    made = make_lock(overlay, 1)
    reviewed = copy.deepcopy(made)
    lose_module(reviewed)
    assert compare(reviewed, made) == [f"{SCHEDULER}: rewritten, but was not before"]


@pytest.mark.parametrize("damage", ["missing", "edited", "line-ends"])
def test_a_diff_that_is_not_the_overlay_s(overlay: Overlay, tmp_path: Path, damage: str) -> None:
    diff = accept(kept(overlay, tmp_path)) / "changes.diff"
    if damage == "missing":
        diff.unlink()
    else:
        data = diff.read_bytes()
        diff.write_bytes(data + b"+more\n" if damage == "edited" else data.replace(b"\n", b"\r\n"))
    with pytest.raises(LockError, match=r"\n    changes.diff is not the diff of these modules\n"):
        check_reviewed(kept(overlay, tmp_path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "a lock is not JSON"),
        (b"<<<<<<< HEAD\n{}", "a lock is not JSON"),
        (b"\xff", "a lock is not JSON"),
        (b"[]", "a lock is damaged"),
        (b'{"schema": 1, "release": "1", "serial": 1, "upstream": {}}', "it lacks modules, not_inserted"),
        (b"{}", "a lock has schema None, and this is the code for 1"),
        (b'{"schema": 2}', "a lock has schema 2, and this is the code for 1"),
    ],
)
def test_a_damaged_lock(tmp_path: Path, content: bytes, told: str) -> None:
    path = shelf(tmp_path).directory(RELEASE) / "lock.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(LockError) as caught:
        read_lock(RELEASE, shelf(tmp_path))
    assert told in str(caught.value)
    assert str(path) in caught.value.where
    assert caught.value.fix


def test_no_lock_is_none(tmp_path: Path) -> None:
    assert read_lock(RELEASE, shelf(tmp_path)) is None


def test_the_serial_goes_up_when_a_module_is_rewritten_differently(overlay: Overlay, tmp_path: Path) -> None:
    first = overlay.modules[0]
    other = replace(overlay, modules=(replace(first, rewritten=first.rewritten + b"# more\n"), *overlay.modules[1:]))
    serials = []
    for accepted in (overlay, overlay, other, other, overlay):
        accept(kept(accepted, tmp_path))
        serials.append(check_reviewed(kept(accepted, tmp_path))["serial"])
    assert serials == [1, 1, 2, 2, 3]


def test_ones_own_vllm_does_not_take_the_place_of_the_published_one(overlay: Overlay, tmp_path: Path) -> None:
    overlay = kept(overlay, tmp_path)
    accept(replace(overlay, artefact=Artefact("wheel", f"vllm-{RELEASE}.whl", "0" * 64)))
    first = overlay.modules[0]
    mine = replace(overlay, modules=(replace(first, upstream=first.upstream + b"# mine\n"), *overlay.modules[1:]))
    with pytest.raises(LockError) as caught:
        accept(mine)
    assert first.path in str(caught.value)
    assert f"--release {RELEASE}+mine" in caught.value.fix
    accept(replace(mine, release=f"{RELEASE}+mine"))


def test_the_published_artefact_keeps_its_name_while_the_content_is_the_same(overlay: Overlay, tmp_path: Path) -> None:
    published = Artefact("wheel", f"vllm-{RELEASE}.whl", "0" * 64)
    accept(kept(replace(overlay, artefact=published), tmp_path))
    accept(kept(overlay, tmp_path))
    assert check_reviewed(kept(overlay, tmp_path))["upstream"]["name"] == published.name
    accept(kept(changed(overlay), tmp_path))
    assert check_reviewed(kept(changed(overlay), tmp_path))["upstream"]["name"] == published.name


def test_only_what_does_not_apply_is_listed_as_not_inserted(overlay: Overlay) -> None:
    outcomes = tuple(Outcome(f"t.{status.name}", status, "x.py", detail="because") for status in Status)
    lock = make_lock(replace(overlay, modules=(), outcomes=outcomes), 1)
    assert [entry["status"] for entry in lock["not_inserted"]] == ["upstreamed", "not applicable"]
