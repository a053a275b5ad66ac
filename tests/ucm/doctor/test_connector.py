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
    assert bare.ask().finding("prefix cache")["status"] == "warning"


def test_a_runtime_without_its_packages(bare: Site) -> None:
    write_vllm(bare.packages)
    (bare.packages / "xxhash.py").unlink()
    found = bare.ask().finding("prefix cache")
    assert (found["status"], found["what"]) == ("warning", "the connectors need xxhash")
    assert found["todo"][0].endswith("-m pip install --upgrade ucm-runtime")
