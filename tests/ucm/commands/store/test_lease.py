"""``ucm store retain``, ``pin`` and ``drop``: the blocks of one prompt, tier by tier."""

from __future__ import annotations

import errno
import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.commands.described import GEOMETRY, NAMESPACE, SIZE, TOKENS, described, keys  # noqa: F401 - a fixture
from tests.ucm.commands.store.test_lookup import below_the_disk, config, prompt  # noqa: F401 - fixtures
from ucm.config.settings import format_size
from ucm.hashing.request_content import RequestContent
from ucm.hashing.request_hasher import RequestHasher
from ucm.salts import tag_name, tag_of_salt
from ucm.store.base import BlockCorruptError, BlockKey
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store, open_tier
from ucm.store.posix import layout as posix_layout
from ucm.store.posix import tier
from ucm.store.posix.files import quarantine
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import touch, unlink
from ucm.store.posix.scan import evict, scan
from ucm.store.tier import LeaseRules, used_until
from ucm.testing.blocks import key, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer, Remote

pytestmark = pytest.mark.usefixtures("described")
RULES = LeaseRules.of(StoreConfig())


@pytest.fixture
def run(ask: Callable[..., Answer], config: Path, prompt: Path) -> Callable[..., Answer]:  # noqa: F811 - fixtures
    def run(command: str, *more: object) -> Answer:
        return ask(command, "--config", config, "--model", "/m", "--tokens", prompt, *more)

    return run


def files(config: Path) -> list[Path]:  # noqa: F811 - the file
    """Return where the prompt's blocks are on disk; 0, 1, 2 and 4 are stored."""
    layout = Layout(str(config.parent / "kv"), f"{NAMESPACE}/g0")
    return [Path(layout.block(one)) for one in keys(5)]


@pytest.mark.parametrize("command", ["retain", "pin"])
def test_the_blocks_of_a_prompt_are_leased(
    run: Callable[..., Answer],
    ask: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    command: str,
) -> None:
    begun = time.time()
    answer = run(command, "--for", "2h")
    assert answer.code == 0, answer.err
    what = {"retain": "retained", "pin": "pinned"}[command]
    first, second = answer.out.splitlines()
    if command == "pin":
        assert first.startswith("Cache: 0 of 1 stored block pinned until 20")
        assert first.endswith("; the others are only retained")
    else:
        assert first.startswith("Cache: 1 of 1 stored block retained until 20")
    assert second.startswith(f"Posix: 4 of 4 stored blocks {what} until 20")
    now = time.time_ns()
    stamps = [path.stat().st_mtime_ns for path in files(config) if path.exists()]
    assert [RULES.is_pinned(stamp, now) for stamp in stamps] == [command == "pin"] * 4
    assert stamps == sorted(stamps, reverse=True)
    assert all(7199 < stamp / 1e9 - begun < 7260 for stamp in stamps)
    nbytes = sum(path.stat().st_size for path in files(config) if path.exists())
    (posix,) = (one for one in ask("stat", "--json", "--config", config).data["directories"] if one["tier"] == "posix")
    (found,) = posix["namespaces"]
    assert (found["leased_bytes"], found["pinned_bytes"]) == (nbytes, nbytes if command == "pin" else 0)
    assert "in blocks with a lease" in ask("stat", "--config", config).out


@pytest.mark.parametrize("command", ["retain", "pin"])
def test_a_lease_is_ended_early(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    command: str,
) -> None:
    def stamps() -> list[int]:
        return [path.stat().st_mtime_ns for path in files(config) if path.exists()]

    os.utime(files(config)[4], (1000.0, 1000.0))
    assert run("unpin").code == 0
    assert stamps()[3] == 1000 * 10**9, "what has no lease is not used by this"
    assert run(command, "--for", "2h").code == 0
    leased = stamps()
    answer = run("unpin", "--from-token", SIZE + 1, "--json")
    posix = {"blocks": 2, "ended": 2, "refused": []}
    assert (answer.code, answer.data) == (
        0,
        {"tiers": {"Cache": {"blocks": 0, "ended": 0, "refused": []}, "Posix": posix}, "without": []},
    )
    assert stamps()[:2] == leased[:2]
    until = used_until(time.time(), StoreConfig().touch_seconds, 0)
    assert all(stamp <= until for stamp in stamps()[2:])
    answer = run("unpin")
    assert answer.out.splitlines() == [
        "Cache: 0 of 1 stored block no longer leased",
        "Posix: 4 of 4 stored blocks no longer leased",
    ]
    assert all(stamp <= until + 60 * 10**9 for stamp in stamps())
    assert stamps() == sorted(stamps(), reverse=True)
    assert not any(RULES.is_pinned(stamp, time.time_ns()) for stamp in stamps())


def test_memory_alone_pins_nothing(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    memory: str,
) -> None:
    config.write_text(f"store: {{pipeline: Cache, dram_directory: {memory}}}\n", encoding="utf-8")
    answer = run("pin", "--for", "1h", "--json")
    assert (answer.code, answer.data["tiers"]) == (1, {"Cache": {"blocks": 1, "leased": 0, "refused": []}})
    assert run("retain", "--for", "1h").code == 0


def test_all_ranks_are_leased(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    described: dict[str, Any],  # noqa: F811 - the fixture
) -> None:
    (stored,) = described["facts"].stored
    described["facts"] = replace(
        described["facts"], stored=(replace(stored, ranks=(f"{NAMESPACE}/g0", f"{NAMESPACE}/g0-other")),)
    )
    root = str(config.parent / "kv")
    with open_store(StoreConfig(directories=(root,)), f"{NAMESPACE}/g0-other", GEOMETRY) as store:
        save(store, keys(2), GEOMETRY)
    assert run("pin", "--for", "1h", "--json").data["tiers"]["Posix"] == {"blocks": 6, "leased": 6, "refused": []}
    assert run("drop", "--json").data == {"dropped": {"Cache": 1, "Posix": 6}, "failed": {}}


def test_a_lease_that_is_too_long_is_refused(run: Callable[..., Answer]) -> None:
    answer = run("pin", "--for", "2d")
    assert answer.code != 0
    assert "a lease of 172800 seconds is too long: the longest has 86400" in answer.err


def test_pins_that_would_not_be_kept_are_refused(
    run: Callable[..., Answer],
    ask: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    tmp_path: Path,
) -> None:
    """A salt may pin what others leave of half of the capacity, and at least its part; then the evictor keeps it."""
    root, salt = config.parent / "kv", tmp_path / "salt"
    nbytes = files(config)[0].stat().st_size
    assert 6 * nbytes < 73 << 10 < 7 * nbytes
    config.write_text(f"store: {{directories: {root}, posix_capacity: 146KiB}}\n", encoding="utf-8")
    salt.write_text("a tenant", encoding="utf-8")
    salt.chmod(0o600)
    tenants = [
        BlockKey(one)
        for one in RequestHasher(b"seed").generate_block_hashes(TOKENS, SIZE, RequestContent(salt="a tenant"))
    ]
    posix = StoreConfig(directories=(str(root),))
    with open_store(posix, f"{NAMESPACE}/g0", GEOMETRY) as store:
        save(store, tenants, GEOMETRY)
    assert run("pin", "--for", "1h").code == 0
    answer = run("pin", "--for", "2h", "--salt-file", salt)
    assert answer.code == 2
    tag, size = tag_name(tag_of_salt("a tenant").hex()), format_size
    assert f"{tag} may pin {size(3 * nbytes)} beside what others have pinned; it has {size(0)} pinned" in answer.err
    assert f"this adds {size(5 * nbytes)}\n  where: {root}" in answer.err
    plain = config.read_text(encoding="utf-8")
    config.write_text(plain.replace("}", ", share_weights: {no-salt: 1}}"), encoding="utf-8")
    answer = run("pin", "--for", "2h", "--salt-file", salt)
    assert (answer.code, f"{tag}, with all salts without a weight, may pin" in answer.err) == (2, True)
    config.write_text(plain, encoding="utf-8")
    layout, rules = Layout(str(root), f"{NAMESPACE}/g0"), LeaseRules.of(posix)

    def pinned() -> list[bool]:
        stamps = [Path(layout.block(one)).stat().st_mtime_ns for one in tenants]
        return [rules.is_pinned(stamp, time.time_ns()) for stamp in stamps]

    assert not any(pinned())
    with closing(open_tier(posix, "Posix", f"{NAMESPACE}/g0")) as tool:
        tool.drop(tenants[3:])
    assert run("pin", "--for", "30min", "--salt-file", salt).code == 0
    assert run("pin", "--for", "2h").code == 0, "what is pinned may stay so for longer"
    (found,) = ask("stat", "--json", "--config", config).data["directories"]
    assert {one["salt"]: one["pinned_bytes"] for one in found["salts"]} == {"no-salt": 4 * nbytes, tag: 3 * nbytes}
    evict(str(root), scan(str(root)), 1e12, lambda _: None, rules, 6 * nbytes)
    assert [Path(layout.block(one)).exists() for one in tenants] == [True] * 3 + [False] * 2
    assert sum(path.exists() for path in files(config)) == 3


def test_nothing_stored_is_a_problem(run: Callable[..., Answer]) -> None:
    assert run("drop").code == 0
    answer = run("retain", "--for", "1h")
    assert (answer.code, answer.out.splitlines()[1].split(" until")[0]) == (1, "Posix: 0 of 0 stored blocks retained")


def test_a_file_system_with_whole_seconds_has_no_pins(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utime = os.utime

    def coarse(path: Any, times: Any = None, *, ns: tuple[int, int] | None = None, **more: Any) -> None:
        if ns is not None:
            times = tuple(one // 10**9 for one in ns)
        utime(path, times, **more)

    monkeypatch.setattr(os, "utime", coarse)
    answer = run("pin", "--for", "1h")
    assert answer.code == 1
    assert "Posix: 0 of 4 stored blocks pinned" in answer.out
    assert all(path.stat().st_mtime > time.time() + 3500 for path in files(config) if path.exists()), "but retained"


def test_blocks_of_other_users_are_named_and_the_others_leased(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str, change: Callable[[int], int]) -> int:
        if path == str(files(config)[1]):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        return touch(path, change)

    monkeypatch.setattr(tier, "touch", refuse)
    answer = run("pin", "--for", "1h")
    assert answer.code == 1
    assert "Posix: 3 of 4 stored blocks pinned" in answer.out
    assert f"Posix: 1 block cannot be leased by this user: [Errno 1] Operation not permitted: '{files(config)[1]}'" in (
        answer.out
    )


def test_a_block_that_an_engine_touches_is_leased_a_moment_later(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []

    def busy(path: str, change: Callable[[int], int]) -> int:
        if held.count(path) < 2:
            held.append(path)
            raise BlockingIOError
        return touch(path, change)

    monkeypatch.setattr(tier, "touch", busy)
    monkeypatch.setattr(tier, "TOUCH_SECONDS", 0.0)
    answer = run("pin", "--for", "1h")
    assert answer.code == 0
    assert "Posix: 4 of 4 stored blocks pinned" in answer.out


def test_what_can_be_dropped_is_dropped(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str) -> None:
        if path == str(files(config)[0]):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(tier, "unlink", refuse)
    answer = run("drop")
    assert answer.code == 1
    assert "Cache: 1 block deleted" in answer.out
    assert f"Posix: 3 blocks deleted, and 1 not: [Errno 1] Operation not permitted: '{files(config)[0]}'" in answer.out
    assert [path.exists() for path in files(config)] == [True] + [False] * 4


def test_damaged_copies_are_dropped_and_those_of_others_kept(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(str(config.parent / "kv"), f"{NAMESPACE}/g0")
    with open_store(StoreConfig(directories=(layout.root,)), layout.namespace, GEOMETRY) as store:
        save(store, [key(7)], GEOMETRY)
    for one in (keys(5)[0], key(7)):
        assert quarantine(layout, one, BlockCorruptError("damaged"), keep=16)
    answer = run("drop", "--json")
    assert (answer.code, answer.data["dropped"]["Posix"]) == (0, 4)
    (left,) = Path(layout.quarantine).iterdir()
    assert key(7).hex() in left.name

    def refuse(path: str) -> list[Any]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(posix_layout, "list_directory", refuse)
    answer = run("drop")
    assert answer.code == 1
    assert f"Permission denied: '{layout.quarantine}'" in answer.out


def test_dropping_one_prompt_leaves_others_whole(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    memory: str,
) -> None:
    root = str(config.parent / "kv")
    others = [key(number) for number in range(20)]
    for place in (StoreConfig(directories=(root,)), StoreConfig(pipeline="Cache", dram_directory=memory)):
        with open_store(place, f"{NAMESPACE}/g0", GEOMETRY) as store:
            save(store, others, GEOMETRY)
    answer = run("drop", "--from-token", SIZE + 1)  # of the second block, too, since it has tokens that are left
    assert (answer.code, answer.out) == (0, "Cache: 0 blocks deleted\nPosix: 2 blocks deleted\n")
    assert [path.exists() for path in files(config)] == [True, True, False, False, False]
    answer = run("drop")
    assert (answer.code, answer.out) == (0, "Cache: 1 block deleted\nPosix: 2 blocks deleted\n")
    for place in (StoreConfig(directories=(root,)), StoreConfig(pipeline="Cache", dram_directory=memory)):
        with open_store(place, f"{NAMESPACE}/g0", GEOMETRY) as store:
            assert store.lookup([*others, *keys(5)]) == [True] * 20 + [False] * 5


def test_a_server_evicts_by_itself_and_its_blocks_can_be_dropped(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    remote: Remote,
) -> None:
    alone = below_the_disk(config, remote)
    with open_store(alone, f"{NAMESPACE}/g0", GEOMETRY) as store:
        assert save(store, [*keys(5)[2:4], key(1)], GEOMETRY).failed == {}
    answer = run("retain", "--for", "1h")
    assert answer.code == 0
    assert answer.out.splitlines()[1] == f"{remote.name}: no leases: what it evicts is decided elsewhere"
    answer = run("drop")
    assert (answer.code, answer.out) == (0, f"Posix: 4 blocks deleted\n{remote.name}: 2 blocks deleted\n")
    with open_store(alone, f"{NAMESPACE}/g0", GEOMETRY) as store:
        assert store.lookup([*keys(5), key(1)]) == [False] * 5 + [True]


def test_a_server_that_does_not_answer_is_named(
    run: Callable[..., Answer],
    config: Path,  # noqa: F811 - the file
    remote: Remote,
) -> None:
    below_the_disk(config, remote, timeout=5.0, transfer_timeout=5.0, **remote.unanswered)
    answer = run("drop")
    assert answer.code == 1
    assert "Posix: 4 blocks deleted" in answer.out
    assert f"{remote.name}: " in answer.out
