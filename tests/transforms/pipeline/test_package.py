"""The source package and the wheel: their contents, and that equal overlays give equal bytes."""

from __future__ import annotations

import base64
import csv
import email.parser
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import tomllib
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from tests.examples import reviewed_examples
from tests.ucm.overlay.miniature import LICENCE, RELEASE, SOURCES
from transforms.engine.marks import marked_lines
from transforms.pipeline.checks import hook_uses
from transforms.pipeline.lock import Lock, built_lock, make_lock, read_lock
from transforms.pipeline.package import (
    RUNTIME,
    Built,
    PackageError,
    build_package,
    build_runtime,
    build_wheel,
    group_needs,
    overlay_version,
    runtime_version,
)
from transforms.pipeline.product import UCM, products
from transforms.pipeline.sbom import make_sbom
from transforms.pipeline.sources.tree import Artefact, sha256
from transforms.place import ROOT
from ucm.config.load import check_connector_config
from ucm.sparse.base import SparseMethod
from ucm.sparse.esa.method import ESA
from ucm.sparse.probe import HOOKS
from ucm.sparse.rerope import ReRoPE
from ucm.sparse.sink_window import SinkWindow
from ucm.sparse.topk.method import BlockTopK

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay

DISTRIBUTION, PACKAGE = UCM.publisher.distribution, UCM.module
INFO = f"{PACKAGE}-{RELEASE}.post1.dist-info"
each_product = pytest.mark.parametrize(
    "product", [*products(), *(product for product, _ in reviewed_examples())], ids=lambda one: one.named("all")
)
PUBLISHED = Artefact("wheel", f"vllm-{RELEASE}-cp38-abi3-manylinux_2_28_x86_64.whl", "ab" * 32)


@dataclass(frozen=True)
class Package:
    """The contents of a built overlay."""

    built: Built
    lock: Lock
    files: dict[str, bytes]

    @property
    def metadata(self) -> Metadata:
        return Metadata.from_email(self.files[f"{INFO}/METADATA"])


def read_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def published(overlay: Overlay) -> Overlay:
    """The overlay, as if made from a published wheel."""
    return replace(overlay, artefact=PUBLISHED)


@pytest.fixture(scope="session")
def package(published: Overlay, tmp_path_factory: pytest.TempPathFactory) -> Package:
    lock = make_lock(published, 1)
    built = build_package(published, lock, tmp_path_factory.mktemp("package"))
    return Package(built, built_lock(lock, all_hooks=False), read_wheel(built.wheel))


def test_two_builds_are_the_same_bytes(
    published: Overlay, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second build has another directory, time and umask."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        again = build_package(published, make_lock(published, 1), tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert again.wheel.name == package.built.wheel.name
    assert again.wheel.read_bytes() == package.built.wheel.read_bytes()


def test_a_build_replaces_what_was_there(published: Overlay, package: Package, tmp_path: Path) -> None:
    old = tmp_path / "packages" / f"vllm-{RELEASE}" / PACKAGE / "modules" / "vllm" / "old.py"
    old.parent.mkdir(parents=True)
    old.touch()
    assert (
        build_package(published, make_lock(published, 1), tmp_path).wheel.read_bytes()
        == package.built.wheel.read_bytes()
    )
    assert not old.exists()


def test_the_source_package_builds_without_us(package: Package, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=package.built.source, check=True, capture_output=True)
    assert next(tmp_path.iterdir()).read_bytes() == package.built.wheel.read_bytes()


def test_the_files(package: Package, published: Overlay) -> None:
    assert sorted(package.files) == sorted(
        [
            f"{PACKAGE}.pth",
            f"{PACKAGE}.start",
            f"{PACKAGE}/__init__.py",
            f"{PACKAGE}/_boot.py",
            f"{PACKAGE}/_plugin.py",
            f"{PACKAGE}/manifest.json",
            *(f"{PACKAGE}/modules/{module.path}" for module in published.modules if module.default),
            f"{INFO}/METADATA",
            f"{INFO}/WHEEL",
            f"{INFO}/RECORD",
            f"{INFO}/entry_points.txt",
            f"{INFO}/licenses/LICENSE",
            f"{INFO}/licenses/NOTICE",
            f"{INFO}/sboms/sbom.cdx.json",
        ]
    )


def test_the_modules_are_the_overlay_s(package: Package, published: Overlay) -> None:
    for module in published.modules:
        if module.default is None:
            continue
        data = package.files[f"{PACKAGE}/modules/{module.path}"]
        assert data == module.default
        header, first, second = data.decode().splitlines()[:3]
        assert header + "\n" == LICENCE
        assert first.startswith(f"# Changed by the UCM overlay for vLLM {RELEASE}. ")
        assert "NOTICE" in second


def test_the_metadata(package: Package) -> None:
    metadata = package.metadata
    assert (metadata.name, str(metadata.version)) == (DISTRIBUTION, f"{RELEASE}.post1")
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE", "NOTICE"]
    assert str(metadata.requires_python) == ">=3.10"
    (extra,) = metadata.requires_dist or []  # not the runtime, whose name on an index may be anybody's
    assert (extra.name, str(extra.specifier), str(extra.marker)) == ("vllm", f"=={RELEASE}", 'extra == "vllm"')
    assert RELEASE in (metadata.description or "")
    assert f"`{RUNTIME}` {runtime_version()} or newer" in (metadata.description or "")


def test_the_wheel_is_for_every_python_and_platform(package: Package) -> None:
    name, version, build, tags = parse_wheel_filename(package.built.wheel.name)
    assert (name, version, build) == (DISTRIBUTION, Version(f"{RELEASE}.post1"), ())
    assert {str(tag) for tag in tags} == {"py3-none-any"}
    assert email.parser.BytesParser().parsebytes(package.files[f"{INFO}/WHEEL"])["Root-Is-Purelib"] == "true"


def test_the_record_holds_every_file_with_its_hash(package: Package) -> None:
    rows = list(csv.reader(io.StringIO(package.files[f"{INFO}/RECORD"].decode())))
    assert sorted(row[0] for row in rows) == sorted(package.files)
    for path, digest, size in rows:
        if path != f"{INFO}/RECORD":
            data = package.files[path]
            encoded = base64.urlsafe_b64encode(bytes.fromhex(sha256(data))).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={encoded}", str(len(data)))


def test_the_manifest(package: Package, published: Overlay) -> None:
    manifest = json.loads(package.files[f"{PACKAGE}/manifest.json"])
    assert (manifest["release"], manifest["version"]) == (RELEASE, f"{RELEASE}.post1")
    needs = group_needs()
    assert manifest["needs"] == {group: needs[group] for group in needs if group != "models"}
    assert [module["path"] for module in manifest["modules"]] == [m.path for m in published.modules if m.default]
    by_path = {module["path"]: module for module in manifest["modules"]}
    scheduler = by_path["vllm/v1/core/sched/scheduler.py"]
    assert scheduler["name"] == "vllm.v1.core.sched.scheduler"
    assert scheduler["processes"] == ["EngineCore"]
    assert "scheduler_output_built" in scheduler["hooks"]
    assert scheduler["changed"]["Scheduler.schedule"] == ["limit_new_tokens", "scheduler_output_built"]
    assert by_path["vllm/v1/core/sched/output.py"]["changed"] == {"SchedulerOutput": []}
    for path, module in by_path.items():
        assert module["upstream_sha256"] == sha256((LICENCE + SOURCES[path]).encode())
        assert module["rewritten_sha256"] == sha256(package.files[f"{PACKAGE}/modules/{path}"])


def test_a_build_with_all_hooks(published: Overlay, package: Package, tmp_path: Path) -> None:
    """It contains every module, its version and manifest say so, and it does not replace the default build."""
    built = build_package(published, make_lock(published, 1), tmp_path, all_hooks=True)
    assert built.wheel.parent == tmp_path / "wheels" / f"vllm-{RELEASE}-all-hooks"
    files = read_wheel(built.wheel)
    manifest, smaller = (json.loads(of[f"{PACKAGE}/manifest.json"]) for of in (files, package.files))
    assert (manifest["version"], manifest["hooks"], manifest["left_out"]) == (f"{RELEASE}.post1+all.hooks", "all", [])
    for module in published.modules:
        assert files[f"{PACKAGE}/modules/{module.path}"] == module.rewritten
    assert smaller["hooks"] == "default"
    hooks, fewer = ({h for m in of["modules"] for h in m["hooks"]} for of in (manifest, smaller))
    assert set(smaller["left_out"]) == hooks - fewer
    assert {"kv_write_begin", "layer_begin", "mla_begin", "request_added", "v2_append_block_ids"} <= hooks - fewer
    sboms = [json.loads(of[name]) for of in (files, package.files) for name in of if name.endswith("sbom.cdx.json")]
    assert [of["metadata"]["component"]["properties"] for of in sboms] == [
        [{"name": "ucm:hooks", "value": value}, {"name": "ucm:owner", "value": "ucm"}] for value in ("all", "default")
    ]
    readmes = [Metadata.from_email(f, validate=False).description or "" for f in _metadata(files, package.files)]
    assert "Hooks: all." in readmes[0]
    assert "A build with `--hooks all` adds blocks_updated, ffn_begin" in readmes[1]


def _metadata(*wheels: dict[str, bytes]) -> list[bytes]:
    return [data for files in wheels for name, data in files.items() if name.endswith(".dist-info/METADATA")]


def test_the_default_modules_have_the_marks_of_shipped_rules_alone(published: Overlay) -> None:
    for module in published.modules:
        all_marks = set(marked_lines(module.rewritten))
        left = all_marks - set(module.opt_in)
        if module.default is None:
            assert left <= {f"{module.transform}.import"}
        else:
            assert set(marked_lines(module.default)) == left


def test_every_hook_of_a_shipped_method_is_in_the_default_overlay(published: Overlay) -> None:
    """No other hook is in it: only hooks that a shipped feature uses are shipped."""
    shipped = {use.hook for m in published.modules if m.default for use in hook_uses(m.default)}
    users = (BlockTopK, ESA, ReRoPE, SinkWindow)
    used = {name for name in HOOKS for method in users if getattr(method, name) is not getattr(SparseMethod, name)}
    seam = {"scheduler_init", "worker_init", "engine_core_started", "kv_cache_memory", "block_hash_function"}
    names = {"build_metadata": "scheduler_output_built", "requests_finished": "worker_requests_finished"}
    wanted = {names.get(name, name) for name in used}
    assert {hook for hook in shipped if not hook.startswith("v2_")} == wanted | seam
    assert {hook for hook in shipped if hook.startswith("v2_")} == {
        "v2_execute_begin",
        "v2_execute_finished",
        "v2_requests_finished",
    }


def test_needs_name_groups_that_exist() -> None:
    needs = group_needs()
    assert {other for others in needs.values() for other in others} <= needs.keys()
    assert all(group not in others for group, others in needs.items())


def test_the_notice_names_the_artefact_and_every_change(package: Package) -> None:
    notice = package.files[f"{INFO}/licenses/NOTICE"].decode()
    assert "modified files of vLLM, Copyright contributors to the vLLM project" in notice
    assert f"    {PUBLISHED.name}\n    sha256 {PUBLISHED.sha256}\n" in notice
    for module in package.lock["modules"]:
        rules = ", ".join(rule["id"] for rule in module["rules"])
        assert f"\n{module['path']}\n    from sha256 {module['upstream_sha256']}\n    rules: {rules}\n" in notice


def test_a_notice_without_an_artefact_names_its_directory(overlay: Overlay, tmp_path: Path) -> None:
    built = build_package(overlay, make_lock(overlay, 1), tmp_path)
    notice = (built.source / "NOTICE").read_text()
    assert f"    {overlay.artefact.name}\n" in notice
    assert "sha256 \n" not in notice


def test_the_licence_is_whole(package: Package) -> None:
    text = package.files[f"{INFO}/licenses/LICENSE"].decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def assert_valid_sbom(data: bytes) -> None:
    # Its import compiles grammars for seconds, which every test process would do to collect this file.
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode()) is None


def test_the_bill_of_materials(package: Package) -> None:
    data = package.files[f"{INFO}/sboms/sbom.cdx.json"]
    assert_valid_sbom(data)
    sbom: dict[str, Any] = json.loads(data)
    (vllm,) = sbom["metadata"]["component"]["pedigree"]["ancestors"]
    assert vllm["purl"] == f"pkg:pypi/vllm@{RELEASE}"
    assert vllm["hashes"] == [{"alg": "SHA-256", "content": PUBLISHED.sha256}]
    assert vllm["properties"] == [{"name": "ucm:artefact", "value": PUBLISHED.name}]
    hashes = {c["name"]: (c["hashes"][0], c["pedigree"]["ancestors"][0]["hashes"][0]) for c in sbom["components"]}
    assert {path: (now["content"], was["content"]) for path, (now, was) in hashes.items()} == {
        m["path"]: (m["rewritten_sha256"], m["upstream_sha256"]) for m in package.lock["modules"]
    }


@each_product
def test_every_reviewed_overlay_s_bill_of_materials_is_valid(product: Product) -> None:
    for release in product.reviewed():
        lock = read_lock(release, product)
        assert lock is not None
        version = overlay_version(release, lock["serial"], product=product)
        sbom = make_sbom(lock, version, "all", product)
        assert_valid_sbom(json.dumps(sbom).encode())
        made = sbom["metadata"]["component"]
        assert made["purl"] == f"pkg:pypi/{product.publisher.distribution}@{version.replace('+', '%2B')}"
        (ancestor,) = made["pedigree"]["ancestors"]
        assert ancestor["purl"] == f"pkg:pypi/{product.package.project}@{release}"
        assert ancestor["hashes"] == [{"alg": "SHA-256", "content": lock["upstream"]["sha256"]}]


def test_a_bill_of_materials_of_a_directory(overlay: Overlay) -> None:
    lock = {**make_lock(overlay, 1), "release": "0.9.0+cpu"}
    sbom = make_sbom(lock, overlay_version("0.9.0+cpu", 1), "default")
    assert_valid_sbom(json.dumps(sbom).encode())
    assert sbom["metadata"]["component"]["purl"] == "pkg:pypi/ucm-vllm-overlay@0.9.0.post1%2Bcpu"


@pytest.mark.parametrize(
    ("release", "serial", "version"),
    [
        ("0.32.0", 1, "0.32.0.post1"),
        ("0.10.1.1", 12, "0.10.1.1.post12"),
        ("0.8.5.post1", 2, "0.8.5.post102"),
        ("0.8.5post1", 2, "0.8.5.post102"),
        ("0.8.5-1", 2, "0.8.5.post102"),
        ("0.33.0rc1", 1, "0.33.0rc1.post1"),
        ("0.33.0.rc1", 1, "0.33.0rc1.post1"),
        ("v0.33.0", 1, "0.33.0.post1"),
        ("0.33.0.dev7", 1, "0.33.0.dev701"),
        ("0.33.0rc1.dev7+g12ab", 1, "0.33.0rc1.dev701+g12ab"),
        ("0.33.0.post2.dev7", 1, "0.33.0.post200.dev701"),
        ("0.33.0+cpu", 1, "0.33.0.post1+cpu"),
        ("0.33.0.post1+cu129.x", 1, "0.33.0.post101+cu129.x"),
        ("1!0.1", 1, "1!0.1.post1"),
    ],
)
def test_a_version(release: str, serial: int, version: str) -> None:
    assert overlay_version(release, serial) == version == str(Version(version))


def test_versions_are_in_order() -> None:
    """Within a release, later serials are newer; across releases, the newer release is."""
    releases = [
        "0.33.0rc1.dev2",
        "0.33.0rc1",
        "0.33.0rc2",
        "0.33.0",
        "0.33.0.post1",
        "0.33.0.post2.dev1",
        "0.33.0.post2",
        "0.33.1.dev3",
        "0.33.1",
        "0.34.0",
    ]
    versions = [Version(overlay_version(release, serial)) for release in releases for serial in (1, 2, 11)]
    assert versions == sorted(set(versions))
    assert all(version > Version(release) for release, version in zip(releases, versions[::3], strict=True))


@each_product
def test_reviewed_versions_are_ones_that_an_index_accepts(product: Product) -> None:
    """Except of overlays with the rules of several owners, which their users build."""
    versions = [Version(overlay_version(release, 1, product=product)) for release in product.reviewed()]
    assert versions == sorted(set(versions))
    for version in versions:
        assert version.local == (f"with.{'.'.join(product.others)}" if product.others else None)
        assert Requirement(f"{product.publisher.distribution}=={version}")


def test_the_runtime_s_wheel(tmp_path: Path) -> None:
    files = read_wheel(build_runtime(tmp_path))
    assert {name.partition("/")[0] for name in files} == {"ucm", f"ucm_runtime-{runtime_version()}.dist-info"}
    assert "ucm/overlay/fingerprints.json" in files
    metadata = Metadata.from_email(files[f"ucm_runtime-{runtime_version()}.dist-info/METADATA"])
    assert (metadata.name, str(metadata.version)) == (RUNTIME, runtime_version())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [f'{one}; extra == "{name}"' for name, of in project["optional-dependencies"].items() for one in of]
    declared = {str(Requirement(one)) for one in [*project["dependencies"], *extras]}
    assert {str(one) for one in metadata.requires_dist or ()} == declared
    assert "prefix cache" in (metadata.summary or "")
    assert "ucm/DESCRIPTION.md" not in files


def test_no_wheel_can_be_uploaded_to_the_public_index_by_mistake(package: Package, tmp_path: Path) -> None:
    """Users know the names as those of the wheels that they build themselves."""
    runtime = read_wheel(build_runtime(tmp_path))[f"ucm_runtime-{runtime_version()}.dist-info/METADATA"]
    for metadata in (package.metadata, Metadata.from_email(runtime)):
        assert "Private :: Do Not Upload" in (metadata.classifiers or ())


def test_links_of_descriptions_work_outside_the_repository(package: Package, tmp_path: Path) -> None:
    runtime = read_wheel(build_runtime(tmp_path))[f"ucm_runtime-{runtime_version()}.dist-info/METADATA"]
    for metadata in (package.metadata, Metadata.from_email(runtime)):
        text = metadata.description or ""
        assert metadata.description_content_type == "text/markdown"
        assert len(text.splitlines()) > 10
        targets = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]: *(\S+)", text, re.MULTILINE)
        assert all(target.startswith("https://") for pair in targets for target in pair if target)


def test_the_description_s_settings_are_valid(tmp_path: Path) -> None:
    """Its example is what a user copies."""
    text = (ROOT / "ucm" / "DESCRIPTION.md").read_text(encoding="utf-8")
    given = json.loads(text.partition("--kv-transfer-config '")[2].partition("'")[0])
    store = {**given["kv_connector_extra_config"]["store"], "directories": str(tmp_path)}  # this machine's
    assert check_connector_config({"store": store}, make=False)[0].store.posix_capacity is not None
    assert (ROOT / given["kv_connector_module_path"].replace(".", "/")).with_suffix(".py").is_file()


def test_the_runtime_states_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (RUNTIME, runtime_version())


def test_a_failed_build_says_what_hatchling_said(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(PackageError) as caught:
        build_wheel(tmp_path, tmp_path / "out")
    assert caught.value.what == "hatchling could not build the wheel"
    assert str(tmp_path) in caught.value.where
    assert "version" in caught.value.where
    assert caught.value.fix
