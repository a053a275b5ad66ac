"""The bill of materials inside an overlay wheel: CycloneDX 1.6, placed in ``.dist-info/sboms`` (PEP 770)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from transforms.pipeline.product import UCM

if TYPE_CHECKING:
    from transforms.pipeline.lock import Lock
    from transforms.pipeline.product import Product


def make_sbom(lock: Lock, version: str, hooks: str, product: Product = UCM) -> dict[str, Any]:
    """Return the bill of materials of an overlay: the package as its ancestor, and each file with its own ancestor.

    Args:
        lock: The part of the overlay's lock that is built.
        version: The overlay's version.
        hooks: The set of hooks: ``default`` or ``all``.
        product: The product of the overlay.
    """
    upstream, name = lock["upstream"], product.publisher.distribution
    namespace = uuid.uuid5(uuid.NAMESPACE_DNS, name)
    origin = f"pkg:pypi/{product.package.project}@{quote(lock['release'])}"
    artefact: dict[str, Any] = {
        "type": "library",
        "bom-ref": origin,
        "name": product.package.project,
        "version": lock["release"],
        "purl": origin,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "properties": [{"name": "ucm:artefact", "value": upstream["name"]}],
    }
    if upstream["sha256"]:
        artefact["hashes"] = [{"alg": "SHA-256", "content": upstream["sha256"]}]
    overlay = f"pkg:pypi/{name}@{quote(version)}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(namespace, version)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": overlay,
                "name": name,
                "version": version,
                "purl": overlay,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [
                    {"name": "ucm:hooks", "value": hooks},
                    *({"name": "ucm:owner", "value": owner} for owner in product.owners),
                ],
                "pedigree": {"ancestors": [artefact], "notes": "modules of the ancestor with statements added by rule"},
            }
        },
        "components": [_file(module) for module in lock["modules"]],
    }


def _file(module: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a rewritten module; its ancestor is the package's file of the same path."""
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
