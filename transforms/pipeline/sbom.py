"""The bill of materials inside an overlay wheel: CycloneDX 1.6, placed in ``.dist-info/sboms`` (PEP 770)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from transforms.pipeline.lock import Lock

NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "ucm-vllm-overlay")


def make_sbom(lock: Lock, version: str) -> dict[str, Any]:
    """The bill of materials of an overlay: vLLM as its origin, and each file with what it was made from.

    Args:
        lock: The overlay's lock.
        version: The overlay's version.
    """
    upstream = lock["upstream"]
    vllm = f"pkg:pypi/vllm@{quote(lock['release'])}"
    artefact: dict[str, Any] = {
        "type": "library",
        "bom-ref": vllm,
        "name": "vllm",
        "version": lock["release"],
        "purl": vllm,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "properties": [{"name": "ucm:artefact", "value": upstream["name"]}],
    }
    if upstream["sha256"]:
        artefact["hashes"] = [{"alg": "SHA-256", "content": upstream["sha256"]}]
    overlay = f"pkg:pypi/ucm-vllm-overlay@{quote(version)}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, version)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": overlay,
                "name": "ucm-vllm-overlay",
                "version": version,
                "purl": overlay,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "pedigree": {"ancestors": [artefact], "notes": "modules of the ancestor with statements added by rule"},
            }
        },
        "components": [_file(module) for module in lock["modules"]],
    }


def _file(module: dict[str, Any]) -> dict[str, Any]:
    """One rewritten module with its ancestor: vLLM's file of the same path."""
    return {
        "type": "file",
        "bom-ref": module["path"],
        "name": module["path"],
        "hashes": [{"alg": "SHA-256", "content": module["rewritten_sha256"]}],
        "pedigree": {
            "ancestors": [
                {
                    "type": "file",
                    "name": module["path"],
                    "hashes": [{"alg": "SHA-256", "content": module["upstream_sha256"]}],
                }
            ],
            "notes": ", ".join(rule["id"] for rule in module["rules"]),
        },
    }
