"""Weights are identified by their bytes, whatever their directory."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.hashing.stand_ins import HfConfig, ModelConfig, read_files, write_model
from ucm.hashing.model_identity import WeightsUnknownError, find_weights

if TYPE_CHECKING:
    from pathlib import Path

COMMIT, OTHER = "a" * 40, "b" * 40
LOAD = SimpleNamespace(load_format="auto")


def identity(model_config: Any, load_config: Any = LOAD) -> tuple[Any, Any]:
    """Return the facts of some weights, and the digests of their files by name."""
    found = find_weights(model_config, load_config)
    digests = read_files(found.files.values())
    return found.facts, {name: digests[path] for name, path in found.files.items()}


def test_two_models_with_one_basename(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one" / "llama", b"A" * 200_000)
    other = write_model(tmp_path / "other" / "llama", b"B" * 200_000)
    assert identity(ModelConfig(str(one))) != identity(ModelConfig(str(other)))


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    one, other = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    os.utime(other / "config.json", (0, 0))
    assert identity(ModelConfig(str(one))) == identity(ModelConfig(str(other)))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("hf_quant_config.json", True),
        ("modeling_mine.py", True),
        ("vocab_parallel_embedding.py", True),
        ("preprocessor_config.json", True),
        ("model-00002-of-00002.safetensors", True),
        ("tokenizer.json", False),
        ("tokenizer_config.json", False),
        ("README.md", False),
    ],
)
def test_which_files_count(tmp_path: Path, name: str, *, counts: bool) -> None:
    path = write_model(tmp_path / "model")
    before = identity(ModelConfig(str(path)))
    (path / name).write_text("{}", encoding="utf-8")
    assert (identity(ModelConfig(str(path))) != before) == counts


def test_random_weights_are_their_seed_and_configuration(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", config='{"a": 1}')
    dummy = SimpleNamespace(load_format="dummy")
    found = [identity(ModelConfig(str(path), seed=seed), dummy) for seed in (0, 1)]
    found.append(identity(ModelConfig(str(write_model(tmp_path / "m2", config='{"a": 2}'))), dummy))
    assert found[0] != found[1] != found[2] != found[0]
    assert set(found[0][1]) == {"config.json"}


def test_a_single_file(tmp_path: Path) -> None:
    found = []
    for content in (b"A", b"B"):
        path = tmp_path / "model.gguf"
        path.write_bytes(content * 1000)
        found.append(identity(ModelConfig(str(path)))[1])
    assert found[0] != found[1]


def test_a_hub_repository_is_known_by_its_files_as_their_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "models--a--b" / "snapshots" / COMMIT)

    def try_to_load_from_cache(repository: str, name: str, revision: str, cache_dir: str | None) -> str:
        assert (repository, name, revision, cache_dir) == ("a/b", "config.json", COMMIT, "/kept")
        return str(path / name)

    hub = SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    load = SimpleNamespace(load_format="auto", download_dir="/kept")
    assert identity(ModelConfig("a/b", revision=COMMIT), load) == identity(ModelConfig(str(path)))


@pytest.mark.parametrize(
    "config",
    [
        {"revision": COMMIT},
        {"revision": COMMIT, "hf_config": HfConfig({}, _commit_hash=OTHER), "hf_config_path": "c/d"},
    ],
)
def test_a_hub_repository_that_is_not_in_the_cache_by_its_commit(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found, _ = identity(ModelConfig("a/b", **config))
    assert found == {"load_format": "auto", "repository": "a/b", "commit": COMMIT}


def test_weights_in_a_directory_of_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--download-dir`` has the weights, and the hub's cache the configuration."""

    def try_to_load_from_cache(
        repository: str, name: str, revision: str | None, cache_dir: str | None = None
    ) -> str | None:
        assert (repository, name) == ("a/b", "config.json")
        return None if cache_dir else f"/hub/models--a--b/snapshots/{COMMIT}/config.json"

    hub = SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    place = write_model(tmp_path / "models--a--b" / "snapshots" / COMMIT)
    (place / "config.json").unlink()
    facts, files = identity(ModelConfig("a/b"), SimpleNamespace(load_format="auto", download_dir=str(tmp_path)))
    assert (facts["repository"], facts["commit"]) == ("a/b", COMMIT)
    assert set(files) == {"model-00001-of-00001.safetensors"}


def test_a_repository_of_modelscope_is_not_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "models--a--b" / "snapshots" / COMMIT)

    def try_to_load_from_cache(
        repository: str, name: str, revision: str | None, cache_dir: str | None = None
    ) -> str | None:
        del repository, revision, cache_dir
        return str(path / name)

    hub = SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert identity(ModelConfig("a/b"))[1]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(WeightsUnknownError, match="whose commit is known"):
        find_weights(ModelConfig("a/b"), LOAD)
    assert identity(ModelConfig(str(path)))[1]


@pytest.mark.parametrize(
    ("model", "other", "counts"),
    [
        ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", True),
        ("m.gguf", "mmproj-m.gguf", True),
        ("m-00001-of-00002.gguf", "n-00002-of-00002.gguf", False),
        ("m.gguf", "n.gguf", False),
    ],
)
def test_files_that_are_loaded_with_a_gguf_file_count(tmp_path: Path, model: str, other: str, *, counts: bool) -> None:
    found = []
    (tmp_path / model).write_bytes(b"A" * 1000)
    for content in (b"A", b"B"):
        (tmp_path / other).write_bytes(content * 1000)
        found.append(identity(ModelConfig(str(tmp_path / model))))
    assert (found[0] != found[1]) == counts


def test_weights_of_other_models_that_are_loaded_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ultravox names the models of its text and audio parts; Kimi-Audio has a directory in its own."""
    model, found = write_model(tmp_path / "model"), []
    text, whisper = tmp_path / "text", model / "whisper-large-v3"
    config = HfConfig({})
    config.text_model_id = str(text)  # type: ignore[attr-defined]
    for content in (b"A", b"B"):
        write_model(text, content * 1000)
        found.append(identity(ModelConfig(str(model), hf_config=config)))
    write_model(whisper, b"C" * 1000)
    found.append(identity(ModelConfig(str(model), hf_config=config)))
    assert len({str(one) for one in found}) == 3
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    config.text_model_id = "org/elsewhere"  # type: ignore[attr-defined]
    with pytest.raises(WeightsUnknownError, match="weights of another model"):
        find_weights(ModelConfig(str(model), hf_config=config), LOAD)


def test_a_hub_repository_whose_commit_the_cache_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_to_load_from_cache(
        repository: str, name: str, revision: str | None, cache_dir: str | None = None
    ) -> str | None:
        assert cache_dir is None
        assert (repository, name) == ("a/b", "config.json")
        return f"/hub/models--a--b/snapshots/{COMMIT}/config.json" if revision is None else None

    hub = SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    dummy = SimpleNamespace(load_format="dummy")
    assert identity(ModelConfig("a/b"), dummy)[0]["commit"] == COMMIT
    with pytest.raises(WeightsUnknownError, match="may be newer"):  # the branch may have moved before they were loaded
        find_weights(ModelConfig("a/b"), LOAD)
    with pytest.raises(WeightsUnknownError, match="whose commit is known"):
        find_weights(ModelConfig("a/b", revision="other"), LOAD)


@pytest.mark.parametrize(
    ("model", "load_format", "more", "message"),
    [
        ("a/b", "auto", {}, "neither a directory nor a hub repository whose commit is known"),
        ("a/b", "auto", {"hf_config": HfConfig({}, _commit_hash=OTHER), "hf_config_path": "c/d"}, "commit is known"),
        ("EMPTY", "auto", {}, "no weights in this directory"),
        ("EMPTY", "tensorizer", {}, "cannot find the files of weights in the format 'tensorizer'"),
        ("EMPTY", "my_plugin", {}, "the format 'my_plugin'"),
        ("EMPTY", "runai_streamer", {"model_weights": "s3://bucket/model"}, "object storage"),
    ],
)
def test_weights_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, load_format: str, more: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    config = ModelConfig(str(tmp_path) if model == "EMPTY" else model, **more)
    load = SimpleNamespace(load_format=load_format)
    with pytest.raises(WeightsUnknownError, match=message) as caught:
        find_weights(config, load)
    assert caught.value.where in {config.model, config.model_weights}
    assert "weights_id" in caught.value.fix
    assert find_weights(config, load, "mine-1") != find_weights(config, load, "mine-2")


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_another_repository_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, trusted: bool) -> None:
    model, code = write_model(tmp_path / "model"), tmp_path / "snapshots" / COMMIT
    code.mkdir(parents=True)
    (code / "modeling.py").write_text("import layers", encoding="utf-8")
    (code / "layers.py").write_text("1", encoding="utf-8")

    def try_to_load_from_cache(repository: str, name: str, revision: str | None, cache_dir: str | None) -> str | None:
        return str(code / name) if (repository, revision) == ("org/code", "v1") else None

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache))
    auto_map = {
        "AutoModel": "org/code--modeling.Model",
        "AutoConfig": "own.Config",
        "AutoTokenizer": ["org/absent--a.B", None],
    }
    config = SimpleNamespace(
        **vars(ModelConfig(str(model)))
        | {"trust_remote_code": trusted, "hf_config": SimpleNamespace(auto_map=auto_map)}
    )
    config.code_revision = "v1"
    before = identity(config)
    (code / "layers.py").write_text("2", encoding="utf-8")
    assert (identity(config) == before) == (not trusted)
    config.code_revision = None
    if trusted:
        with pytest.raises(WeightsUnknownError, match="code of a repository that is not in the hub's cache"):
            identity(config)
    else:
        assert identity(config) == before
