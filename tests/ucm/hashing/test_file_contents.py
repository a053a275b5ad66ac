"""Files are identified by all of their bytes, and only in the state in which the engine can have read them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.hashing.stand_ins import read_files
from ucm.hashing import file_contents
from ucm.hashing.file_contents import (
    DigestCache,
    Digests,
    FileChangedError,
    FileContents,
    FileState,
    process_started,
)

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

ANY_TIME = float("inf")
HUB = "models--a--b"
#: Seconds within which the start of a process is known.
RESOLUTION = 0.05


@pytest.fixture(autouse=True)
def _no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the wait for a clock tick, because these tests' files are young; one test waits for it."""
    monkeypatch.setattr(file_contents, "_TICK", -1e9)
    monkeypatch.setattr(file_contents, "_COARSE_TICK", -1e9)


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "digests.json")


def tick(directory: Path) -> float:
    """Let the file system's clock go on; return a time between that of all earlier changes and of all later ones.

    This clock cannot be simulated, and ticks some hundred times per second.
    """
    probe = directory / "probe"
    probe.touch()
    before = FileState.of(probe).changed
    while FileState.of(probe).changed == before:
        probe.touch()
    probe.unlink()
    return before


def known(path: Path, cache: DigestCache, since: float = ANY_TIME) -> bool:
    """Return whether a file's digest was known without reading it; read it then."""
    contents = FileContents(since, cache)
    found = contents.look_up([path])
    unread = bool(found.unread)
    assert contents.read(found).of == {path: hashlib.sha256(path.read_bytes()).hexdigest()}
    return not unread


def safetensors(path: Path, tensors: int, source: random.Random) -> None:
    """Write a file with a header and tensors of random sizes and values."""
    offsets, end = [], 0
    for _ in range(tensors):
        begin, end = end, end + 2 * source.randrange(1, 400)
        offsets.append([begin, end])
    names = {
        f"layers.{n}.weight": {"dtype": "BF16", "shape": [(b - a) // 2], "data_offsets": [a, b]}
        for n, (a, b) in enumerate(offsets)
    }
    header = json.dumps(names).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + source.randbytes(end))


def test_no_change_of_a_single_byte_goes_undetected(tmp_path: Path) -> None:
    source, detected = random.Random(9), 0  # noqa: S311 - the same changes each time
    for tensors in (10, 50, 300, 2000):
        path = tmp_path / f"{tensors}.safetensors"
        safetensors(path, tensors, source)
        before, size = read_files([path])[path], path.stat().st_size
        for _ in range(60):
            with path.open("r+b") as file:
                at = source.randrange(size)
                file.seek(at)
                (was,) = file.read(1)
                file.seek(at)
                file.write(bytes([was ^ (1 << source.randrange(8))]))
                file.flush()
                detected += read_files([path])[path] != before
                file.seek(at)
                file.write(bytes([was]))
        assert read_files([path])[path] == before
    assert detected == 240


def test_a_files_digest_is_its_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_contents, "_CHUNK", 1000)
    contents = {tmp_path / str(size): os.urandom(size) for size in (0, 1, 999, 1000, 1001, 5432)}
    for path, content in contents.items():
        path.write_bytes(content)
    assert read_files(contents) == {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}


def test_a_second_look_reads_nothing(tmp_path: Path, cache: DigestCache) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"A" * 100_000)
    assert [known(path, cache) for _ in range(3)] == [False, True, True]
    path.write_bytes(b"B" * 100_000)
    assert [known(path, cache) for _ in range(2)] == [False, True]


def test_times_that_somebody_sets_do_not_hide_a_change(tmp_path: Path, cache: DigestCache) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"A" * 100_000)
    before = path.stat()
    assert not known(path, cache)
    with path.open("r+b") as file:
        file.write(b"B")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert not known(path, cache)


def test_a_file_that_takes_anothers_place_is_read(tmp_path: Path, cache: DigestCache) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    for each, content in ((path, b"A"), (other, b"B")):
        each.write_bytes(content * 100_000)
        os.utime(each, (1e9, 1e9))
    assert not known(path, cache)
    other.rename(path)
    assert not known(path, cache)


@pytest.mark.parametrize("coarse", [True, False])
def test_files_of_two_images_with_the_same_whole_second_are_both_read(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch, *, coarse: bool
) -> None:
    """A read-only image has the times that its maker gave it, and its inodes count from one."""
    ctime = 10**18 + (0 if coarse else 1)

    def _from(found: os.stat_result, path_ns: int) -> FileState:
        return FileState(7, 2, found.st_size, 10**18, ctime, path_ns)

    monkeypatch.setattr(FileState, "_from", _from)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"A" * 100_000)
    one = read_files([path], cache)[path]
    path.write_bytes(b"B" * 100_000)
    assert (read_files([path], cache)[path] != one) == coarse


def test_the_configuration_may_be_older_than_its_engines_process(tmp_path: Path) -> None:
    """The process that starts another has read it before."""
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        since = pool.apply(file_contents.configuration_since)
    assert since == pytest.approx(file_contents.process_started(), abs=1)
    assert since < began
    path = tmp_path / "config.json"
    assert file_contents.changed_since(path, 0)
    path.write_text("{}", encoding="utf-8")
    assert file_contents.changed_since(path, since)
    assert not file_contents.changed_since(path, time.time() + 10)


@pytest.mark.parametrize("spoil", ["mode", "directory", "text", "format", "digest", "link", "owner"])
def test_a_cache_that_others_may_have_written_is_not_believed(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"A" * 1000)
    assert [known(path, cache) for _ in range(2)] == [False, True]
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    text = cache.path.read_text(encoding="ascii")
    if spoil == "mode":
        cache.path.chmod(0o666)
    elif spoil == "directory":
        cache.path.parent.chmod(0o777)
    elif spoil == "text":
        cache.path.write_text(text[:-5], encoding="ascii")
    elif spoil == "format":
        cache.path.write_text(text.replace("digests/1", "digests/0"), encoding="ascii")
    elif spoil == "digest":
        cache.path.write_text(text.replace('": "', '": "x'), encoding="ascii")
    elif spoil == "link":
        cache.path.rename(tmp_path / "elsewhere")
        cache.path.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.load() == {}
    assert not known(path, cache)


def test_a_cache_that_cannot_be_written_costs_reading_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = DigestCache(tmp_path / "file" / "digests.json")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"A")
    assert [known(path, cache) for _ in range(2)] == [False, False]


def test_the_cache_forgets_the_oldest(cache: DigestCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_contents, "_KEPT", 3)
    for number in range(5):
        cache.add({str(number): f"{number:064x}"})
    assert list(cache.load()) == ["2", "3", "4"]


def test_it_lies_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert DigestCache().path == Path("/elsewhere/ucm/digests.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert DigestCache().path == Path("/home/me/.cache/ucm/digests.json")


def test_what_is_written_after_the_engines_start_is_not_what_it_loaded(tmp_path: Path, cache: DigestCache) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"A")
    started = tick(tmp_path)
    assert not known(path, cache, started)
    with path.open("r+b") as file:
        file.write(b"A")
    os.utime(path, (1e9, 1e9))
    for _ in range(2):  # that another process has read it since does not help
        with pytest.raises(FileChangedError, match="written or moved after this process started") as caught:
            FileContents(started, cache).look_up([path])
        assert caught.value.where == str(path)
        assert "weights_id" in caught.value.fix
        known(path, cache)


@pytest.mark.parametrize("how", ["file", "link", "directory", "above"])
def test_older_files_that_come_into_place_after_the_start_are_not_what_it_loaded(tmp_path: Path, how: str) -> None:
    """Their own timestamps may be years old."""
    for name, content in (("one", b"A"), ("other", b"B")):
        directory = tmp_path / name / "model"
        directory.mkdir(parents=True)
        (directory / "w.bin").write_bytes(content)
        (directory / "more").write_bytes(content)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one" / "model")
    path = link / "w.bin" if how == "link" else tmp_path / "one" / "model" / "w.bin"
    started = tick(tmp_path)
    FileContents(started).look_up([path])
    if how == "file":
        (tmp_path / "other" / "model" / "w.bin").rename(path)
    elif how == "link":
        link.unlink()
        link.symlink_to(tmp_path / "other" / "model")
    else:
        one, other = (
            (path.parent, tmp_path / "other" / "model")
            if how == "directory"
            else (
                tmp_path / "one",
                tmp_path / "other",
            )
        )
        one.rename(tmp_path / "gone")
        other.rename(one)
    assert path.read_bytes() == b"B"
    with pytest.raises(FileChangedError, match="written or moved"):
        FileContents(started).look_up([path])


def test_new_neighbours_of_a_file_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "model" / "w.bin"
    path.parent.mkdir()
    path.write_bytes(b"A")
    contents = FileContents(tick(tmp_path))
    found = contents.look_up([path])
    (path.parent / "notes.txt").write_bytes(b"")
    assert list(contents.read(found).of) == [path]


@pytest.mark.parametrize("how", ["write", "replace", "touch", "remove", "move"])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "model" / "w.bin"
    path.parent.mkdir()
    path.write_bytes(b"A" * 3000)
    real = hashlib.sha256

    def change() -> None:
        if how == "write":
            with path.open("r+b") as file:
                file.write(b"B")
        elif how == "replace":
            (tmp_path / "new").write_bytes(b"A" * 3000)
            (tmp_path / "new").rename(path)
        elif how == "touch":
            os.utime(path)
        elif how == "remove":
            path.unlink()
        else:
            path.parent.rename(tmp_path / "moved")

    def sha256(string: bytes = b"", *, usedforsecurity: bool = True) -> object:
        change()
        return real(string, usedforsecurity=usedforsecurity)

    contents = FileContents(tick(tmp_path), cache)
    found = contents.look_up([path])
    monkeypatch.setattr(hashlib, "sha256", sha256)
    with pytest.raises((FileChangedError, FileNotFoundError)):
        contents.read(found)


def test_a_file_that_has_just_been_written_is_read_when_a_change_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    monkeypatch.setattr(file_contents, "_TICK", 3600.0)
    monkeypatch.setattr(file_contents, "_COARSE_TICK", 7200.0)
    path = tmp_path / "w.bin"
    path.write_bytes(b"A")
    state = FileState.of(path)
    assert state.settles == pytest.approx(state.changed + 3600)
    assert state._replace(ctime_ns=state.ctime_ns // 10**9 * 10**9).settles == state.ctime_ns // 10**9 + 7200
    read_files([path], clock=clock)
    assert clock.time() >= state.settles
    assert clock.alive == []


def test_reading_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    contents, real, digests = FileContents(ANY_TIME), hashlib.sha256, []
    found = contents.look_up([path])

    class Ending:
        """Ends the reading with the third piece of the file."""

        def __init__(self) -> None:
            self.pieces = 0
            digests.append(self)

        def update(self, piece: bytes) -> None:
            self.pieces += bool(piece)
            if self.pieces == 3:
                contents.close()

    def sha256(string: bytes = b"", *, usedforsecurity: bool = True) -> object:
        return real(string, usedforsecurity=usedforsecurity) if string else Ending()

    monkeypatch.setattr(hashlib, "sha256", sha256)
    with pytest.raises(FileChangedError, match="stopped early"):
        contents.read(found)
    assert [digest.pieces for digest in digests] == [3]


def test_no_file_is_read_after_one_that_cannot_be(tmp_path: Path, clock: SimulatedClock) -> None:
    """Every thread has ended when the error is raised, so that none uses the files any more."""
    paths = [tmp_path / f"{number}.bin" for number in range(40)]
    for path in paths:
        path.write_bytes(b"A")
    contents = FileContents(ANY_TIME, clock=clock)
    found = contents.look_up(paths)
    paths[0].unlink()
    with pytest.raises(FileNotFoundError):
        contents.read(found)
    clock.run_until_idle()
    assert (found.of, clock.alive) == ({}, [])


def test_a_read_that_waits_for_a_tick_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    monkeypatch.setattr(file_contents, "_TICK", 3600.0)
    monkeypatch.setattr(file_contents, "_COARSE_TICK", 3600.0)
    path = tmp_path / "w.bin"
    path.write_bytes(b"A")
    contents = FileContents(ANY_TIME, clock=clock)
    found = contents.look_up([path])

    def end() -> None:
        clock.sleep(60)
        contents.close()

    clock.thread(end, "end").start()
    with pytest.raises(FileChangedError, match="stopped early"):
        contents.read(found)
    assert clock.alive == []


def hub_file(root: Path, content: bytes, name: str) -> Path:
    """Write a file of a hub's cache: a link to a blob."""
    blob, link = root / HUB / "blobs" / name, root / HUB / "snapshots" / ("c" * 40) / "w.bin"
    for directory in (blob.parent, link.parent):
        directory.mkdir(parents=True)
    blob.write_bytes(content)
    link.symlink_to(Path("..") / ".." / "blobs" / name)
    return link


def test_a_hub_files_own_digest_counts(tmp_path: Path, cache: DigestCache) -> None:
    """Including a file that the engine itself downloaded from the hub after its start."""
    name = "5" * 64
    path = hub_file(tmp_path, b"something else, so that reading would show", name)
    found = FileContents(0.0, cache).look_up([path])
    assert (found.of, found.unread, found.read_bytes) == ({path: name}, [], 0)


def test_a_hub_file_that_was_changed_through_its_link_is_read(tmp_path: Path, cache: DigestCache) -> None:
    content = b"weights" * 1000
    path = hub_file(tmp_path, content, hashlib.sha256(content).hexdigest())
    tick(tmp_path)
    with path.open("r+b") as file:
        file.write(b"W")
    assert not known(path, cache)
    with pytest.raises(FileChangedError):
        FileContents(0.0, cache).look_up([path])


def test_a_small_hub_file_is_known_by_gits_hash(tmp_path: Path) -> None:
    content = b'{"model_type": "llama"}'
    name = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()  # noqa: S324 - it is git's
    path = hub_file(tmp_path, content, name)
    assert FileContents(0.0).look_up([path]).of == {path: hashlib.sha256(content).hexdigest()}
    tick(tmp_path)
    path.resolve().write_bytes(content + b" ")
    assert FileContents(ANY_TIME).look_up([path]).unread == [path]


@pytest.mark.parametrize("name", ["5" * 63, "x" * 64])
def test_a_link_to_something_else_is_read(tmp_path: Path, name: str, cache: DigestCache) -> None:
    assert not known(hub_file(tmp_path, b"A", name), cache)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        read_files([tmp_path])


def test_the_start_of_a_process() -> None:
    """Measured many times, because each pause of the process makes it seem older."""
    before = time.time()
    code = (
        "import time; now = time.time(); from ucm.hashing.file_contents import process_started as started; "
        "print(max(started() for _ in range(100)), now)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, first_statement = map(float, done.stdout.split())
    assert before - RESOLUTION <= found <= first_statement + RESOLUTION
    assert process_started() < before


def test_a_read_that_took_no_time_can_be_told() -> None:
    """A clock may not have gone on; the log line is written before the engine's identity is known."""
    assert "0.50 GB read, " in str(Digests(read_bytes=500_000_000, seconds=0.0))
    assert "(0.25 GB/s)" in str(Digests(read_bytes=500_000_000, seconds=2.0))
