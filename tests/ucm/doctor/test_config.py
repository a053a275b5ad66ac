"""`ucm doctor --config` checks settings as an engine does, without starting one or creating anything."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.doctor.site import ROOT
from tests.ucm.store.conftest import memory  # noqa: F401 - a fixture
from tests.ucm.store.keys import key_file, secret
from ucm.doctor.config_checks import check_config, check_model
from ucm.doctor.findings import Status
from ucm.sparse.factory import METHODS, method_class
from ucm.store.authentication import Authenticator

if TYPE_CHECKING:
    from tests.ucm.doctor.site import Site

#: The modules that reading settings needs.
PACKAGES = ("annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "yaml")


def write(directory: Path, text: str) -> Path:
    path = directory / "ucm_config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def complete(site: Site) -> Site:
    """An environment in which settings can be read, with the packages of the tests' own environment."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (site.packages / f"{name}.py").unlink(missing_ok=True)
        if spec.submodule_search_locations:
            (site.packages / name).symlink_to(Path(spec.origin).parent)
        else:
            shutil.copyfile(spec.origin, site.packages / f"{name}.py")
    return site


def test_settings_that_can_be_used(complete: Site, tmp_path: Path) -> None:
    file = write(tmp_path, f"store: {{directories: {tmp_path}/new/kv}}\nenable_event_sync: true\n")
    answer = complete.doctor("--json", "--config", str(file))
    assert (answer.code, answer.err, answer.statuses()) == (0, "", {})
    found = answer.finding("configuration")
    assert found["what"] == f"{file} can be used: connector direct, store Posix"
    details = "\n".join(found["details"])
    for line in (
        "enable_event_sync has no effect here",
        f"{tmp_path}/new/kv does not exist yet; the engine creates it",
        "posix_capacity is not set",
        "not checked, because that needs an engine: the model",
    ):
        assert line in details
    assert [path.name for path in tmp_path.iterdir() if path.name != "venv"] == [file.name], "nothing is made"


@pytest.mark.parametrize(
    ("blend", "connector"), [("", "UCMConnector"), ("blend: {}", "BlendConnector")], ids=["cache", "blending"]
)
def test_how_the_checked_settings_are_used(complete: Site, tmp_path: Path, blend: str, connector: str) -> None:
    """The command names the file by an absolute path, quoted for a shell, and the connector that accepts it."""
    folder = complete.root / "elsewhere" / "it's here"
    folder.mkdir(parents=True)
    file = write(folder, f"store: {{directories: {tmp_path}/kv}}\n{blend}\n")
    answer = complete.doctor("--json", "--config", f"{folder.name}/{file.name}")
    details = answer.finding("prefix cache")["details"]
    words = shlex.split(details[1])
    setting = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert (answer.code, setting["kv_connector"]) == (0, connector)
    assert setting["kv_connector_extra_config"] == {"UCM_CONFIG_FILE": str(file)}
    source = (ROOT / setting["kv_connector_module_path"].replace(".", "/")).with_suffix(".py").read_text()
    assert f"class {connector}(" in source
    write(folder, "store: {directories: 7}\n")
    answer = complete.doctor("--json", "--config", str(file))
    assert (answer.code, "vllm serve" in answer.out) == (1, False), "no command uses settings that are refused"


def test_settings_that_cannot(complete: Site, tmp_path: Path) -> None:
    text = f"conector: layerwise\nhit_ratio: 2\nstore: {{directories: [{tmp_path}/ucm_config.yaml/kv, /proc/kv]}}\n"
    file = write(tmp_path, text + "ucm_sparse_config: {BlockTopK: {tokenbudget: 4}}\n")
    answer = complete.doctor("--json", "--config", str(file))
    assert (answer.code, answer.statuses()) == (1, {"configuration": "error", "sparse settings": "error"})
    assert answer.data["verdict"].endswith("at import. The settings are not valid.")
    found = answer.finding("configuration")
    assert found["what"] == "4 settings cannot be used"
    details = "\n".join(found["details"])
    for line in (
        "'conector' is not a setting",
        "more than 1.0",
        "ucm_config.yaml/kv does not exist and cannot be created: Not a directory",
        "/proc/kv does not exist and cannot be created: ",
    ):
        assert line in details
    sparse = answer.finding("sparse settings")
    assert sparse["what"] == "BlockTopK has no option 'tokenbudget'"
    assert f"  where: {file}: ucm_sparse_config.BlockTopK.tokenbudget" in sparse["details"]
    assert answer.data["next"] == [
        f"correct {file} as described under 'configuration'",
        f"correct {file} as described under 'sparse settings'",
    ]


def test_where_settings_cannot_be_read(site: Site, tmp_path: Path) -> None:
    """The packages of the small vLLM are empty."""
    answer = site.doctor("--json", "--config", str(write(tmp_path, "store: {pipeline: Empty}\n")))
    found = answer.finding("configuration")
    assert (answer.code, found["status"]) == (1, "error")
    assert "cannot be checked: cannot import name " in found["what"]


def test_a_sparse_method_without_an_overlay(complete: Site, tmp_path: Path) -> None:
    for path in complete.packages.glob("ucm_vllm_overlay*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    file = write(tmp_path, "store: {pipeline: Empty}\nucm_sparse_config: {SinkWindow: {}}\n")
    answer = complete.doctor("--json", "--config", str(file))
    assert (answer.code, answer.statuses()) == (1, {"overlay": "error"})
    assert answer.data["verdict"] == "No UCM overlay is installed, and the configured sparse method needs one."
    assert "nox -s build-overlay" in answer.data["next"][0]
    assert answer.finding("prefix cache")["what"] == "UCM's connectors can run here, with or without an overlay"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (found,) = check_config(tmp_path / "none.yaml")
    assert (found.status, found.what) == (
        Status.ERROR,
        "the configuration file does not exist",
    )
    assert found.todo == (f"correct the path, or write the file: {tmp_path}/none.yaml",)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (found,) = check_config(tmp_path)
    assert (found.status, found.what) == (Status.ERROR, "the configuration file cannot be read: Is a directory")
    assert found.todo == (f"correct the path, or make the file readable: {tmp_path}",)


@pytest.mark.parametrize(
    ("sparse", "status", "what"),
    [
        (
            "{ESA: {token_budget: 4, store: {pipeline: Dram}}}",
            Status.OK,
            "the method ESA is installed, and its options are",
        ),
        ("{GSAOnDevice: {token_budget: 0}}", Status.ERROR, "Input should be greater than or equal to 1"),
        ("{BlockTopK: {tokenbudget: 4, budget_share: 2}}", Status.ERROR, "2 settings cannot be used"),
        ("{StreamingLLM: {}}", Status.OK, "the method StreamingLLM is installed"),
        ("{Probe: {}}", Status.OK, "the method Probe is installed; it checks its options itself"),
        ("{BlokTopK: {}}", Status.ERROR, "there is no sparse method 'BlokTopK'"),
        ("{'no.such:Method': {}}", Status.ERROR, "the sparse method 'no.such:Method' cannot be loaded"),
        ("{ESA: {}, SinkWindow: {}}", Status.ERROR, "2 sparse methods are named, but only one can run"),
    ],
)
def test_the_sparse_method(sparse: str, status: Status, what: str, tmp_path: Path) -> None:
    settings, found = check_config(write(tmp_path, f"store: {{pipeline: Empty}}\nucm_sparse_config: {sparse}\n"))
    assert settings.status is Status.OK
    assert found.status is status
    assert found.what.startswith(what)


def test_all_options_of_the_method_are_told_at_once_with_what_may_be_meant(tmp_path: Path) -> None:
    sparse = "{GSAOnDevice: {tokenbudget: 4, budget_share: 2.0, dense_layers: -1, min_context: many}}"
    _, found = check_config(write(tmp_path, f"store: {{pipeline: Empty}}\nucm_sparse_config: {sparse}\n"))
    assert found.what == "4 settings cannot be used"
    details = "\n".join(found.details)
    for line in (
        "ucm_sparse_config.GSAOnDevice.tokenbudget",
        "did you mean 'token_budget'?",
        "ucm_sparse_config.GSAOnDevice.budget_share: 2.0",
        "ucm_sparse_config.GSAOnDevice.dense_layers: -1",
        "ucm_sparse_config.GSAOnDevice.min_context: 'many'",
    ):
        assert line in details


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("BlockTopK", ""),
        ("ESA", ""),
        ("SinkWindow", ""),
        ("ReRoPE", "window: 8"),
        ("LeakyReRoPE", "window: 8, leak: 2"),
    ],
)
def test_a_method_whose_hooks_are_switched_off(
    method: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCM_DISABLE_ATTENTION_PATCH", "1")
    file = write(tmp_path, f"store: {{pipeline: Empty}}\nucm_sparse_config: {{{method}: {{{options}}}}}\n")
    _, found = check_config(file)
    assert found.status is Status.ERROR
    assert found.what == f"{method} needs hooks that are switched off"
    assert found.todo == ("unset it, or serve without ucm_sparse_config",)
    assert "UCM_DISABLE_ATTENTION_PATCH" in " ".join(found.details)


def test_the_options_of_all_our_methods_are_known() -> None:
    unknown = {name for name in METHODS if method_class(name).options_type is None}
    assert unknown == {"Probe"}, "it takes what it is given"


def test_what_blending_wants_is_said(complete: Site, tmp_path: Path) -> None:
    text = f"store: {{directories: {tmp_path}}}\nblend: {{}}\n"
    answer = complete.doctor("--json", "--config", str(write(tmp_path, text)))
    found = answer.finding("blending")
    assert (answer.code, found["status"]) == (0, "ok")
    assert found["what"] == "chunks of 256 tokens or more are reused anywhere in a prompt"
    assert found["details"][0].startswith("name BlendConnector in --kv-transfer-config")


def test_blending_beside_a_sparse_method_is_refused(complete: Site, tmp_path: Path) -> None:
    text = f"store: {{directories: {tmp_path}}}\nblend: {{}}\nucm_sparse_config: {{ReRoPE: {{window: 8}}}}\n"
    answer = complete.doctor("--json", "--config", str(write(tmp_path, text)))
    found = answer.finding("blending")
    assert (answer.code, found["status"]) == (1, "error")
    assert "cannot be combined" in found["what"]
    assert found["todo"] == ["leave one of blend and ucm_sparse_config out"]


def test_what_rerope_wants_is_said(complete: Site, tmp_path: Path) -> None:
    method = "ucm_sparse_config: {LeakyReRoPE: {window: 512, leak: 16}}"
    answer = complete.doctor(
        "--json", "--config", str(write(tmp_path, f"store: {{directories: {tmp_path}}}\n{method}\n"))
    )
    details = answer.finding("sparse settings")["details"]
    assert details[0].endswith("--max-model-len N --hf-overrides '{\"max_position_embeddings\": N}'")
    assert "distances reach 512, growing by one for every 16 tokens before the window" in details[1]


def test_a_memory_tier_on_a_disk_is_refused(tmp_path: Path, memory: str) -> None:  # noqa: F811
    file = write(tmp_path, f"store: {{pipeline: Dram, dram_directory: '{memory}', dram_capacity: 64MiB}}\n")
    assert [found.check for found in check_config(file)] == ["configuration"]
    file = write(tmp_path, f"store: {{pipeline: Dram, dram_directory: '{tmp_path}/disk'}}\n")
    for _ in range(2):  # as it will be, and as it is
        found = check_config(file)[1]
        assert (found.status, "is not in a tmpfs" in found.what) == (Status.ERROR, True)
        (tmp_path / "disk").mkdir(mode=0o700, exist_ok=True)


def test_what_the_authentication_key_is_worth_is_said(tmp_path: Path) -> None:
    path = Path(key_file(tmp_path / "key", secret("k")))
    file = write(tmp_path, f"store: {{directories: '{tmp_path}/kv', authentication_key_file: '{path}'}}\n")
    (found,) = check_config(file)
    said = f"blocks are authenticated; the key's fingerprint is {Authenticator(secret('k')).fingerprint.hex()}"
    assert (found.status, said in found.details) == (Status.OK, True)
    other = Path(key_file(tmp_path / "short", "k" * 4))
    file = write(tmp_path, f"store: {{directories: '{tmp_path}/kv', authentication_key_file: '{other}'}}\n")
    (found,) = check_config(file)
    assert found.status is Status.ERROR
    assert "the key has 4 characters, but needs at least 32" in "\n".join((found.what, *found.details))


@pytest.mark.parametrize("place", [{}, {"text_config": {"kv_lora_rank": 512}}], ids=["of text", "of text and images"])
def test_a_model_with_latent_attention(complete: Site, tmp_path: Path, place: dict[str, object]) -> None:
    """It needs hooks that an overlay has only on request, and a method that serves it."""
    file = write(tmp_path, "store: {pipeline: Empty}\nucm_sparse_config: {BlockTopK: {}}\n")
    (tmp_path / "config.json").write_text(json.dumps(place or {"kv_lora_rank": 512}))
    arguments = ("--json", "--config", str(file), "--model", str(tmp_path))
    assert "sparse settings" not in complete.doctor(*arguments).statuses()
    _leave_out(complete, "mla_begin")
    answer = complete.doctor(*arguments)
    assert answer.code == 1
    found = next(f for f in answer.data["findings"] if (f["check"], f["status"]) == ("sparse settings", "error"))
    assert found["what"] == "latent attention needs hooks that this overlay was built without"
    assert "the model has latent attention" in found["details"]
    assert "build-overlay -- 0.32.0 --hooks all" in str(answer.data["next"])
    assert complete.doctor(*arguments, VLLM_MLA_DISABLE="1").code == 0
    (tmp_path / "config.json").write_text(json.dumps({"text_config": None, "kv_lora_rank": None}))
    assert complete.doctor(*arguments).code == 0


def test_without_a_model_nothing_is_known_of_its_attention(complete: Site, tmp_path: Path) -> None:
    file = write(tmp_path, "store: {pipeline: Empty}\nucm_sparse_config: {SinkWindow: {}}\n")
    answer = complete.doctor("--json", "--config", str(file))
    found = answer.finding("latent attention")
    assert (answer.code, found["status"]) == (0, "ok")
    assert found["what"] == "not checked, because that needs the model: add --model DIR, its directory"
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert "latent attention" not in complete.doctor("--json", "--config", str(file), "--model", str(tmp_path)).out
    file = write(tmp_path, "store: {pipeline: Empty}\n")
    assert "latent attention" not in complete.doctor("--json", "--config", str(file)).out


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (False, "this sparse method does not serve speculative decoding"),
        (True, "sparse methods serve only drafts by custom_class, ngram, suffix"),
    ],
)
def test_the_drafts_that_a_method_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, served: bool, said: str
) -> None:
    file = write(tmp_path, "store: {pipeline: Empty}\nucm_sparse_config: {SinkWindow: {}}\n")
    monkeypatch.setattr(method_class("SinkWindow"), "serves_drafts", served)
    (found,) = (one for one in check_config(file) if one.check == "sparse settings")
    assert found.details[-1] == f"with --speculative-config: {said}"


def test_a_method_that_does_not_serve_latent_attention(complete: Site, tmp_path: Path) -> None:
    file = write(tmp_path, "store: {pipeline: Empty}\nucm_sparse_config: {SinkWindow: {}}\n")
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    answer = complete.doctor("--json", "--config", str(file), "--model", str(tmp_path))
    assert answer.code == 1
    assert "only BlockTopK (GSAOnDevice) serves latent attention (MLA)" in answer.out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not JSON: "),
        ("[]", "is not a JSON object"),
        ("\udcff", "is not JSON: "),
    ],
    ids=["none", "cut off", "a list", "not UTF-8"],
)
def test_a_model_that_cannot_be_read(tmp_path: Path, content: str | None, why: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    found, text = check_model(tmp_path)
    assert (found.check, found.status, text) == ("model", Status.ERROR, {})
    assert found.what.startswith(f"{tmp_path}/config.json {why}")
    assert found.todo == ("give --model the directory of a model, with its config.json",)


@pytest.mark.parametrize("method", ["", "ucm_sparse_config: {BlockTopK: {}}"], ids=["no method", "a method"])
def test_a_directory_without_a_readable_model(complete: Site, tmp_path: Path, method: str) -> None:
    file = write(tmp_path, f"store: {{pipeline: Empty}}\n{method}\n")
    answer = complete.doctor("--json", "--config", str(file), "--model", str(tmp_path / "model"))
    found = answer.finding("model")
    assert (answer.code, answer.err, found["status"]) == (1, "", "error")
    assert found["what"].startswith(f"{tmp_path}/model/config.json cannot be read: No such file or directory")
    assert answer.data["verdict"].endswith("at import. The model cannot be used.")


def test_a_text_config_that_is_no_object(complete: Site, tmp_path: Path) -> None:
    file = write(tmp_path, "store: {pipeline: Empty}\nucm_sparse_config: {BlockTopK: {}}\n")
    (tmp_path / "config.json").write_text('{"text_config": "small"}')
    answer = complete.doctor("--json", "--config", str(file), "--model", str(tmp_path))
    assert (answer.code, answer.err) == (1, "")
    assert answer.finding("model")["what"] == f"{tmp_path}/config.json: text_config is not a JSON object"


def _leave_out(site: Site, hook: str) -> None:
    """Make the overlay one that was built without a hook."""
    path = site.packages / "ucm_vllm_overlay" / "manifest.json"
    manifest = json.loads(path.read_text())
    for module in manifest["modules"]:
        module["hooks"] = [name for name in module["hooks"] if name != hook]
    path.write_text(json.dumps({**manifest, "left_out": [hook]}))
