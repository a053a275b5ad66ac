"""The example of a deployment: its manifests are valid, agree with each other, and fit the settings of UCM and of vLLM.

`tests/e2e/test_deploy.py` runs the image's build steps, and asks vLLM's own parser about the arguments.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parts import RELEASES
from transforms.pipeline.lock import read_lock
from ucm.config.load import check_connector_config
from ucm.config.settings import parse_size

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SETTINGS = KUBERNETES / "ucm_config.yaml"
#: Releases of Kubernetes: one that clusters of today still run, and the newest with schemas.
CLUSTERS = ("1.31", "1.37")
#: Kinds of the Prometheus operator, for which there are no schemas on the index.
OPERATOR = "monitoring.coreos.com/v1"
#: Seconds that vLLM's processes get to end after their last request, as its own process manager does.
MARGIN = 15
#: `kubectl apply` keeps a copy of an object in an annotation of at most so many bytes.
MOST_ANNOTATED = 256 * 1024


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects in a file by kind; each kind once."""
    found = list(yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")))
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found)
    return by_kind


OBJECTS = documents("deployment.yaml")
WATCHED = documents("monitoring.yaml")
POD = OBJECTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
ARGUMENTS: list[str] = CONTAINER["args"]


def transfer() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ARGUMENTS[ARGUMENTS.index("--kv-transfer-config") + 1])
    return found


def volume(name: str) -> dict[str, Any]:
    (found,) = (one for one in POD["spec"]["volumes"] if one["name"] == name)
    return dict(found)


def mounted_at(path: str) -> str:
    """Return the volume that a path is on."""
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    (found,) = (name for place, name in mounts.items() if path == place or path.startswith(f"{place}/"))
    return str(found)


def size(text: str) -> int:
    return int(parse_size(text if text.endswith("B") else f"{text}B"))


@pytest.fixture
def kubernetes() -> Any:
    """The validator, whose import takes seconds, which every test process would need to collect this file."""
    import kubernetes_validate  # noqa: PLC0415

    return kubernetes_validate


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_is_valid(kubernetes: Any, kind: str, cluster: str) -> None:
    kubernetes.validate(OBJECTS[kind], cluster, strict=True)


def test_an_unknown_field_would_be_found(kubernetes: Any) -> None:
    wrong = {**OBJECTS["Service"], "spec": {**OBJECTS["Service"]["spec"], "selectors": {}}}
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, CLUSTERS[-1], strict=True)


def test_image_and_wheels_are_of_one_reviewed_release() -> None:
    """It is the one that the end-to-end tests run."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (release,) = re.findall(r"^ARG VLLM_RELEASE=(\S+)$", text, re.MULTILINE)
    assert CONTAINER["image"] == f"vllm-openai-ucm:v{release}"
    assert release == RELEASES[0]
    assert read_lock(release) is not None
    named = {*re.findall(r"vllm-(\d[\d.]*\d)", text), *re.findall(r"ucm:v(\d[\d.]*\d)", text)}
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert named == {release} == {*re.findall(r"(?:vllm-|:v|-- )(\d[\d.]*\d)", readme)}
    assert "FROM ${BASE}" in text
    assert "vllm-openai:v${VLLM_RELEASE}" in text


def test_the_pod_lives_until_requests_have_ended_and_blocks_are_saved() -> None:
    (waits,) = (int(one.partition("=")[2]) for one in ARGUMENTS if one.startswith("--shutdown-timeout="))
    command = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert waits > 0
    assert POD["spec"]["terminationGracePeriodSeconds"] >= int(command[1]) + waits + MARGIN


def test_the_connector_is_ours_and_reads_the_settings_that_are_mounted() -> None:
    config = transfer()
    module = (ROOT / config["kv_connector_module_path"].replace(".", "/")).with_suffix(".py")
    assert f"class {config['kv_connector']}(" in module.read_text(encoding="utf-8")
    file = Path(config["kv_connector_extra_config"]["UCM_CONFIG_FILE"])
    (generator,) = kustomization(KUBERNETES)["configMapGenerator"]
    assert generator["files"] == [file.name] == [SETTINGS.name]
    assert volume(mounted_at(str(file)))["configMap"]["name"] == generator["name"]


def test_the_settings_are_valid_and_fit_the_volumes(tmp_path: Path) -> None:
    written = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))["store"]
    # The pod's directories are not this machine's.
    here = {name: str(tmp_path / name) for name in ("directories", "dram_directory")}
    store = check_connector_config({"store": {**written, **here}}, make=False)[0].store
    claim = OBJECTS["PersistentVolumeClaim"]
    assert volume(mounted_at(written["directories"]))["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert store.posix_capacity is not None
    assert store.posix_capacity < 0.95 * size(claim["spec"]["resources"]["requests"]["storage"])
    memory = volume(mounted_at(written["dram_directory"]))["emptyDir"]
    assert memory["medium"] == "Memory"
    assert store.dram_capacity is not None
    assert store.dram_capacity < size(memory["sizeLimit"]) < size(CONTAINER["resources"]["limits"]["memory"]) / 2


def test_ports_and_labels_agree() -> None:
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert f"--port={ports['http']}" in ARGUMENTS
    probes = [CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    (service,) = OBJECTS["Service"]["spec"]["ports"]
    monitor = WATCHED["PodMonitor"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert {service["targetPort"], endpoint["port"], *(probe["port"] for probe in probes)} == set(ports)
    assert (endpoint["path"], {probe["path"] for probe in probes}) == ("/metrics", {"/health"})
    selectors = [OBJECTS["Service"]["spec"]["selector"], monitor["selector"]["matchLabels"]]
    for selector in [*selectors, OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"]]:
        assert selector.items() <= POD["metadata"]["labels"].items()


def test_the_alerts_are_those_of_the_documentation() -> None:
    """Except that of the disk, which is a claim here."""
    blocks = [
        block
        for file in (ROOT / "docs").glob("*.md")
        for block in re.findall(
            r"^```yaml\n(groups:.*?)^```", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    ]
    (documented,) = (yaml.safe_load(block)["groups"] for block in blocks)
    groups = WATCHED["PrometheusRule"]["spec"]["groups"]
    (disk,) = (rule for group in groups for rule in group["rules"] if rule["alert"] == "UcmDiskNearlyFull")
    assert f'persistentvolumeclaim="{OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]}"' in disk["expr"]
    assert disk["expr"].split()[-2:] == ["<", "0.05"]
    for group in documented:
        for rule in group["rules"]:
            if rule["alert"] == disk["alert"]:
                rule["expr"] = disk["expr"]
    assert groups == documented


def test_the_operator_s_objects_are_of_its_kinds() -> None:
    assert {(one["apiVersion"], kind) for kind, one in WATCHED.items()} == {
        (OPERATOR, "PodMonitor"),
        (OPERATOR, "PrometheusRule"),
    }
    assert not OBJECTS.keys() & WATCHED.keys()


def kustomization(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    return found


def test_kustomize_finds_what_it_needs() -> None:
    """A file must be in its directory or below; a directory with a kustomization of its own may be anywhere."""
    top = kustomization(KUBERNETES)
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    bases = [one for one in top["resources"] if one not in files]
    assert files == {*top["resources"], SETTINGS.name} - {*bases}
    assert {image["name"] for image in top["images"]} == {CONTAINER["image"].partition(":")[0]}
    for base in bases:
        (generator,) = kustomization(KUBERNETES / base)["configMapGenerator"]
        for name in generator["files"]:
            text = (KUBERNETES / base / name).read_text(encoding="utf-8")
            assert json.loads(text)["panels"]
            assert len(json.dumps(text)) < MOST_ANNOTATED
