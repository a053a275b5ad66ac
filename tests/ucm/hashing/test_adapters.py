"""A LoRA adapter is identified by its files, not its name."""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.hashing.stand_ins import LoRARequest, write_adapter
from ucm.hashing import request_content as adapters_module
from ucm.hashing.file_contents import FileContents
from ucm.hashing.name_ledger import NameLedger
from ucm.hashing.request_content import AdapterError
from ucm.hashing.request_content import Adapters as AnyAdapters

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.hashing.file_contents import Digests

#: The adapters of an engine that starts after the test has written its files.
Adapters = functools.partial(AnyAdapters, since=float("inf"))


def test_one_name_with_two_contents_is_two_adapters(tmp_path: Path) -> None:
    one = LoRARequest("sql", 1, str(write_adapter(tmp_path / "one" / "sql", b"A" * 5000)))
    other = LoRARequest("sql", 2, str(write_adapter(tmp_path / "other" / "sql", b"A" * 4999 + b"B")))
    adapters = Adapters()
    assert adapters.fingerprint(one) != adapters.fingerprint(other)


def test_two_contents_of_one_number_are_neither_believed(tmp_path: Path) -> None:
    """vLLM loads the second one only if it has evicted the first."""
    paths = [write_adapter(tmp_path / name, name.encode()) for name in ("one", "copy", "other")]
    write_adapter(tmp_path / "copy", b"one")
    one, copy, other = (LoRARequest("sql", 1, str(path)) for path in paths)
    adapters = Adapters()
    assert adapters.fingerprint(one) == adapters.fingerprint(copy)
    for request in (other, one):
        with pytest.raises(AdapterError, match="lora_int_id 1 was used for different weights"):
            adapters.fingerprint(request)


def test_two_contents_of_one_name_are_neither_believed_where_vllm_finds_blocks_by_name(tmp_path: Path) -> None:
    """A request of the second finds blocks of the first in vLLM's own prefix cache, and would save them."""
    one, other = (LoRARequest("sql", n, str(write_adapter(tmp_path / str(n), b"%d" % n))) for n in (1, 2))
    adapters = Adapters(by_name=True)
    adapters.fingerprint(one)
    for request in (other, one):
        with pytest.raises(AdapterError, match="lora_name 'sql' was used for different weights"):
            adapters.fingerprint(request)


def test_an_adapter_that_is_loaded_in_place_is_not_believed(tmp_path: Path) -> None:
    """Nor is the previous adapter of that number: its requests may still run, with the new weights."""
    path = str(write_adapter(tmp_path, b"A"))
    adapters = Adapters()
    adapters.fingerprint(LoRARequest("a", 1, path))
    anew = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path, load_inplace=True)
    with pytest.raises(AdapterError, match="loaded in place"):
        adapters.fingerprint(anew)
    with pytest.raises(AdapterError, match="was used for different weights"):
        adapters.fingerprint(LoRARequest("a", 1, path))


@pytest.mark.parametrize("in_place", [True, False])
def test_an_adapter_that_was_replaced_is_void_for_the_requests_that_run(tmp_path: Path, *, in_place: bool) -> None:
    """The replacement may be reported by a request, or by the worker that noticed it."""
    lora_request = LoRARequest("a", 1, str(write_adapter(tmp_path, b"A")))
    adapters = Adapters()
    assert not adapters.is_invalidated(lora_request)
    adapters.fingerprint(lora_request)
    assert not adapters.is_invalidated(lora_request)
    if in_place:
        with pytest.raises(AdapterError, match="loaded in place"):
            adapters.fingerprint(SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/", load_inplace=True))
    else:
        adapters.replaced(1)
    assert adapters.is_invalidated(lora_request)
    with pytest.raises(AdapterError, match="was used for different weights"):
        adapters.fingerprint(lora_request)


def test_one_content_is_one_adapter_under_any_name_and_path(tmp_path: Path) -> None:
    one = LoRARequest("sql", 1, str(write_adapter(tmp_path / "one", b"A")))
    other = LoRARequest("text", 7, str(write_adapter(tmp_path / "other", b"A")))
    assert Adapters().fingerprint(one) == Adapters().fingerprint(other)
    assert len(Adapters().fingerprint(one)) == 32


@pytest.mark.parametrize(("name", "change"), [("adapter_config.json", '{"r": 8, "lora_alpha": 32}'), ("more.bin", "x")])
def test_every_file_counts(tmp_path: Path, name: str, change: str) -> None:
    path = write_adapter(tmp_path, b"A")
    before = Adapters().fingerprint(LoRARequest("a", 1, str(path)))
    (path / name).write_text(change, encoding="utf-8")
    assert Adapters().fingerprint(LoRARequest("a", 1, str(path))) != before


def test_notes_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, b"A")
    before = Adapters().fingerprint(LoRARequest("a", 1, str(path)))
    (path / "README.md").write_text("trained on Tuesday", encoding="utf-8")
    assert Adapters().fingerprint(LoRARequest("a", 1, str(path))) == before


def test_how_an_adapter_is_applied_counts(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path, b"A"))
    kinds: list[dict[str, Any]] = [{}, {"is_3d_lora_weight": True}, {"long_lora_max_len": 32768}]
    requests = [SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path, **kind) for kind in kinds]
    assert len({Adapters().fingerprint(request) for request in requests}) == 3
    assert Adapters({"lora_dtype": "float32"}).fingerprint(requests[0]) != Adapters().fingerprint(requests[0])


def test_files_that_change_under_a_running_engine_are_not_believed(tmp_path: Path) -> None:
    request = LoRARequest("a", 1, str(write_adapter(tmp_path, b"A")))
    adapters = Adapters()
    before = adapters.fingerprint(request)
    assert adapters.fingerprint(request) == before
    write_adapter(tmp_path, b"B")
    with pytest.raises(AdapterError, match="may not be those that the engine loaded"):
        adapters.fingerprint(request)


def test_files_that_were_written_after_the_engines_start_are_not_believed(tmp_path: Path) -> None:
    """The engine may have loaded others before, when the adapter was added, long before its first request."""
    request = LoRARequest("a", 1, str(write_adapter(tmp_path, b"A")))
    with pytest.raises(AdapterError, match="written or moved after this process started"):
        AnyAdapters(since=0.0).fingerprint(request)


def test_a_file_that_comes_or_goes_is_seen(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, b"A")
    adapters = Adapters()
    adapters.fingerprint(LoRARequest("a", 1, str(path)))
    (path / "more.safetensors").write_bytes(b"B")
    with pytest.raises(AdapterError, match="added or removed"):
        adapters.fingerprint(LoRARequest("a", 1, str(path)))


def test_a_large_adapter_is_read_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    request = LoRARequest("a", 1, str(write_adapter(tmp_path, b"A" * 5000)))
    expected = Adapters().fingerprint(request)
    monkeypatch.setattr(adapters_module, "_AT_ONCE", 100)
    go_on, read = clock.event(), FileContents.read

    def slowly(self: FileContents, found: Digests) -> Digests:
        go_on.wait()
        return read(self, found)

    monkeypatch.setattr(FileContents, "read", slowly)
    adapters = Adapters(clock=clock)
    with pytest.raises(AdapterError, match="is being read"):
        adapters.fingerprint(request)
    go_on.set()
    clock.run_until_idle()
    assert adapters.fingerprint(request) == expected


def test_a_replaced_file_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, b"A")
    weights = path / "adapter_model.safetensors"
    adapters = Adapters()
    adapters.fingerprint(LoRARequest("a", 1, str(path)))
    state = weights.stat()
    (path / "new").write_bytes(b"B")
    os.utime(path / "new", ns=(state.st_atime_ns, state.st_mtime_ns))
    (path / "new").rename(weights)
    with pytest.raises(AdapterError, match="changed while"):
        adapters.fingerprint(LoRARequest("a", 1, str(path)))


def test_a_new_revision_under_the_same_name_and_path_is_not_believed(tmp_path: Path) -> None:
    """vLLM gives it the blocks of the first one, until its prefix cache is emptied."""
    blocks = NameLedger()
    adapters = Adapters(blocks=blocks)
    adapters.fingerprint(LoRARequest("a", 1, str(write_adapter(tmp_path, b"A"))))
    new = LoRARequest("a", 2, str(write_adapter(tmp_path, b"B")))
    for _ in range(2):
        with pytest.raises(AdapterError, match="lora_name 'a' was used for different weights"):
            adapters.fingerprint(new)
    blocks.clear()
    assert adapters.fingerprint(new) == Adapters().fingerprint(new)


def test_what_is_remembered_of_adapters_is_bounded(tmp_path: Path) -> None:
    """A name that was forgotten is not trusted, because its number may be replaced without any notice."""
    requests = [LoRARequest(str(n), n, str(write_adapter(tmp_path / str(n), b"%d" % n))) for n in range(6)]
    blocks = NameLedger()
    adapters = Adapters(blocks=blocks, most=3)
    for request in requests:
        adapters.fingerprint(request)
    assert [adapters.is_invalidated(request) for request in requests] == [True] * 3 + [False] * 3
    assert len(adapters._seen) == len(adapters._used) == 3
    blocks.clear()
    adapters.still_run(requests[5:])
    assert list(adapters._used) == [(5, adapters.name_of(requests[5]))]
    assert adapters.fingerprint(requests[0]) == Adapters().fingerprint(requests[0])


def test_an_adapter_that_was_forgotten_is_compared_with_what_its_number_was(tmp_path: Path) -> None:
    blocks = NameLedger()
    adapters = Adapters(blocks=blocks, most=1)
    for name in ("v1", "v2"):
        write_adapter(tmp_path / name, name.encode())
    link = tmp_path / "current"
    link.symlink_to("v1")
    adapters.fingerprint(LoRARequest("a", 1, str(link)))
    adapters.fingerprint(LoRARequest("b", 2, str(tmp_path / "v1")))
    link.unlink()
    link.symlink_to("v2")
    blocks.clear()
    adapters.still_run([])
    with pytest.raises(AdapterError, match="lora_int_id 1 was used"):
        adapters.fingerprint(LoRARequest("a", 1, str(link)))


def test_a_link_that_moves_to_a_new_revision_is_noticed(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        write_adapter(tmp_path / name, name.encode())
    link = tmp_path / "current"
    link.symlink_to("v1")
    adapters = Adapters()
    adapters.fingerprint(LoRARequest("a", 1, str(link)))
    link.unlink()
    link.symlink_to("v2")
    for number in (1, 2):
        with pytest.raises(AdapterError, match=r"may not be those|was used for different weights"):
            adapters.fingerprint(LoRARequest("a", number, str(link)))


def test_a_branch_of_the_hub_that_moves_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for the number that has the old revision, which vLLM may have evicted and loads anew."""
    branch = tmp_path / "refs" / "main"
    branch.parent.mkdir()
    for name in ("v1", "v2"):
        write_adapter(tmp_path / "snapshots" / name, name.encode())
    hub = SimpleNamespace(snapshot_download=lambda *_, **__: str(tmp_path / "snapshots" / branch.read_text()))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    branch.write_text("v1")
    adapters = Adapters()
    adapters.fingerprint(LoRARequest("a", 1, "someone/adapter"))
    branch.write_text("v2")
    for number, match in ((1, "another revision"), (2, "lora_name 'a' was used"), (1, "another revision")):
        with pytest.raises(AdapterError, match=match):
            adapters.fingerprint(LoRARequest("a", number, "someone/adapter"))


def test_a_number_under_a_second_name_with_other_weights_voids_both(tmp_path: Path) -> None:
    adapters = Adapters()
    one, other = (LoRARequest(name, 1, str(write_adapter(tmp_path / name, name.encode()))) for name in ("a", "b"))
    adapters.fingerprint(one)
    for request in (other, one):
        with pytest.raises(AdapterError, match="lora_int_id 1 was used"):
            adapters.fingerprint(request)
    elsewhere = LoRARequest("b", 2, other.lora_path)
    with pytest.raises(AdapterError, match="lora_name 'b' was used"):
        adapters.fingerprint(elsewhere)


def test_an_adapter_of_the_hub_is_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_adapter(tmp_path, b"A")
    asked: list[tuple[str, bool]] = []

    def snapshot_download(repo_id: str, *, local_files_only: bool) -> str:
        asked.append((repo_id, local_files_only))
        return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    found = Adapters().fingerprint(LoRARequest("a", 1, "someone/adapter"))
    assert found == Adapters().fingerprint(LoRARequest("a", 1, str(path)))
    assert asked == [("someone/adapter", True)]


@pytest.mark.parametrize("path", ["", "/nowhere/at/all", "someone/adapter"])
def test_an_adapter_that_is_not_there(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AdapterError, match="cannot be read"):
        Adapters().fingerprint(LoRARequest("a", 1, path))


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(AdapterError, match="contains no weights"):
        Adapters().fingerprint(LoRARequest("a", 1, str(tmp_path)))


def test_weights_that_come_from_elsewhere() -> None:
    request = SimpleNamespace(
        lora_name="a", lora_int_id=1, lora_path="/a", tensorizer_config_dict={"tensorizer_uri": "s3://b"}
    )
    with pytest.raises(AdapterError, match="tensorizer"):
        Adapters().fingerprint(request)
