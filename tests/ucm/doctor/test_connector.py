"""What the doctor says of the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ucm.doctor.site import write_connector_api, write_vllm

if TYPE_CHECKING:
    from tests.ucm.doctor.site import Site


def test_a_vllm_that_recomputes_what_failed_to_load(bare: Site) -> None:
    write_vllm(bare.packages)
    found = bare.ask().finding("prefix cache")
    assert (found["status"], found["what"]) == ("ok", "UCM's connectors can run, with or without an overlay")
    assert found["details"][0].startswith("vLLM computes the tokens of blocks that fail to load")


def test_a_vllm_that_does_not(bare: Site) -> None:
    write_vllm(bare.packages)
    write_connector_api(bare.packages, "get_num_new_matched_tokens")
    assert "verified and held first" in bare.ask().finding("prefix cache")["details"][0]


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
