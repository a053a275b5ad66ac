"""Nobody is told to install one of our distributions by its name: no package index has them, so anybody may take it.

Messages and projects name the wheel, the folder or the command that builds it.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import tomllib

from transforms.pipeline.package import RUNTIME, TOOLS
from transforms.pipeline.product import OWN
from ucm.errors import PIP, install_extra

ROOT = Path(__file__).parents[1]
OURS = (RUNTIME, TOOLS, *(registry.distribution for registry in OWN))
#: What a user sees: messages in code, templates of what a build writes, and examples that are copied.
PLACES = ("ucm", "transforms", "examples", "docs", "README.md", "CONTRIBUTING.md", "noxfile.py", "pyproject.toml")
#: An installation that names a distribution, not a file (`…/ucm_runtime-*.whl`), a placeholder or an uninstallation.
BY_NAME = re.compile(rf"(?<!un)install\b[^`\n]*?(?<![\w/<*-])({'|'.join(OURS)})(?![\w-]| wheel)")


def texts() -> list[Path]:
    kinds = {".py", ".j2", ".md", ".toml", ".yaml"}
    places = [ROOT / name for name in PLACES]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    return [file for file in files if file.suffix in kinds]


@pytest.mark.parametrize(
    ("text", "is_by_name"),
    [
        ("pip install --upgrade ucm-runtime", True),
        ("pip install 'ucm-runtime[redis]'", True),
        ("python -m pip install 'ucm-runtime>=0.1.0' xxhash", True),
        ("uv pip install ucm-vllm-overlay==0.32.0", True),
        ("pip install <ucm-runtime wheel>", False),
        ("pip install <folder>/ucm_runtime-*.whl", False),
        ("pip uninstall ucm-vllm-overlay", False),
        ("pip install ucm-overlay-tools", True),
        ("ucm-runtime is installed", False),
    ],
)
def test_what_counts(text: str, is_by_name: bool) -> None:
    assert bool(BY_NAME.search(text)) is is_by_name


def test_nothing_says_to_install_ours_by_name() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in texts()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if BY_NAME.search(line) and "Do not install" not in line
    ]
    assert len(texts()) > 200
    assert found == []


def test_no_project_of_ours_depends_on_ours_by_name() -> None:
    """pip would ask the index for it wherever the wheel is not installed yet."""
    for file in (file for file in texts() if file.name == "pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = [need for needs in project.get("optional-dependencies", {}).values() for need in needs]
        named = [need for need in [*project.get("dependencies", []), *extras] if need.startswith(OURS)]
        assert named == [], file


def test_an_extra_is_installed_by_the_names_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {
        RUNTIME: ["numpy>=1", 'redis<9,>=8; extra == "redis"', "obstore>=1 ; extra == 's3'", 'boto>1; extra == "s3"']
    }
    monkeypatch.setattr(metadata, "requires", lambda distribution_name: declared[distribution_name])
    assert install_extra("redis") == f"{PIP} install 'redis<9,>=8'"
    assert install_extra("s3") == f"{PIP} install 'obstore>=1' 'boto>1'"
    assert install_extra("unknown") == f"{PIP} install '<ucm_runtime wheel>[unknown]'"


def test_from_a_checkout_an_extra_is_that_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(distribution_name: str) -> list[str]:
        raise metadata.PackageNotFoundError(distribution_name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_extra("redis") == f"{PIP} install '<ucm_runtime wheel>[redis]'"
