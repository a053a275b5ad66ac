"""The doctor's findings about the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.ucm.doctor.site import ROOT, write_connector_api, write_vllm
from ucm.config import ConnectorConfig
from ucm.config.document import read_document
from ucm.config.upstream import translate

if TYPE_CHECKING:
    from tests.ucm.doctor.site import Site


def test_a_vllm_that_has_connectors(bare: Site) -> None:
    write_vllm(bare.packages)
    found = bare.ask().finding("prefix cache")
    assert (found["status"], found["what"]) == ("ok", "UCM's connectors can run here, with or without an overlay")
    assert "verified before they are promised" in found["details"][0]


def test_how_it_is_switched_on(bare: Site) -> None:
    write_vllm(bare.packages)
    found = bare.ask().finding("prefix cache")
    setting = json.loads(found["details"][1].partition("--kv-transfer-config ")[2].strip("'"))
    assert (setting["kv_connector"], setting["kv_role"]) == ("UCMConnector", "kv_both")
    assert (ROOT / Path(*setting["kv_connector_module_path"].split("."))).with_suffix(".py").is_file()
    assert translate(read_document(setting["kv_connector_extra_config"]), ConnectorConfig.model_fields).problems == []
    assert (ROOT / found["details"][2].removeprefix("documentation: ").split()[0]).is_file()


def test_a_vllm_without_the_connector_api(bare: Site) -> None:
    write_vllm(bare.packages)
    file = write_connector_api(bare.packages, "something_else")
    found = bare.ask().finding("prefix cache")
    assert (found["status"], found["details"]) == ("warning", [str(file)])
    file.unlink()
    answer = bare.ask()
    assert (answer.code, answer.finding("prefix cache")["status"]) == (0, "warning")


def test_settings_for_a_vllm_without_the_connector_api_are_an_error(bare: Site, tmp_path: Path) -> None:
    write_vllm(bare.packages)
    write_connector_api(bare.packages, "something_else")
    answer = bare.doctor("--json", "--config", str(tmp_path / "ucm.yaml"))
    assert answer.finding("prefix cache")["status"] == "error"


def test_a_runtime_without_its_packages(bare: Site) -> None:
    write_vllm(bare.packages)
    (bare.packages / "xxhash.py").unlink()
    (bare.packages / "yaml.py").unlink()
    answer = bare.ask()
    found = answer.finding("prefix cache")
    assert (answer.code, found["status"], found["what"]) == (1, "error", "the connectors need xxhash, yaml")
    assert found["todo"] == [f"{bare.python} -m pip install xxhash pyyaml"]
    assert answer.data["verdict"].endswith("the prefix cache does not. The prefix cache cannot run.")


def test_an_overlay_works_beside_a_prefix_cache_that_cannot(site: Site) -> None:
    (site.packages / "xxhash.py").unlink()
    answer = site.ask()
    assert answer.code == 1
    assert answer.data["verdict"].startswith("UCM's overlay is active: 4 of its 4 modules")
    assert answer.data["verdict"].endswith("at import. The prefix cache cannot run.")


def test_settings_without_the_packages_that_read_them(site: Site, tmp_path: Path) -> None:
    (site.packages / "pydantic.py").unlink()
    (tmp_path / "ucm.yaml").touch()
    answer = site.doctor("--json", "--config", str(tmp_path / "ucm.yaml"))
    assert answer.code == 1
    assert "cannot be checked" in answer.finding("configuration")["what"]
    assert answer.data["next"] == [f"{site.python} -m pip install pydantic"]
