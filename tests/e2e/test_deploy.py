"""The example of a deployment on a real vLLM: the image's build steps run, and vLLM accepts the server's arguments."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.environment import build_wheels, make_venv, plain
from transforms.place import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.environment import Environment

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

DEPLOY = ROOT / "examples" / "deploy"
#: Parses the arguments as `vllm serve` does, and prints what the pod relies on.
PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
commands = parser.add_subparsers(required=True)
for command in cmd_init():
    command.subparser_init(commands)
found = parser.parse_args(["serve", *sys.argv[1:]])
transfer = found.kv_transfer_config
print()
print(json.dumps([found.model_tag, found.port, found.shutdown_timeout, transfer.kv_connector, transfer.kv_role]))
"""


def containerfile() -> tuple[str, list[str]]:
    """Return the directory to which the wheels are copied, and the commands that are run."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (copied,) = re.findall(r"^COPY \*\.whl (\S+)/$", text, re.MULTILINE)
    commands = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    assert len(commands) == text.count("RUN ")
    return copied, commands


def image(directory: Path, below: Environment, wheels: list[Path]) -> tuple[Path, dict[str, str]]:
    """Make an environment with pip and the image's vLLM, and the folder with the wheels of the build's context."""
    python = make_venv(below.python, directory / "image", [])
    (packages,) = (directory / "image" / "lib").glob("python3*/site-packages")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below.site)!r})\n", encoding="utf-8")
    subprocess.run([python, "-m", "ensurepip"], check=True, capture_output=True)
    context = directory / "wheels"
    context.mkdir()
    for wheel in wheels:
        shutil.copy(wheel, context)
    return context, {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(directory)}


def build(directory: Path, below: Environment, wheels: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the build's steps up to the first that fails."""
    context, environ = image(directory, below, wheels)
    copied, commands = containerfile()
    for command in commands:
        step = ["/bin/sh", "-c", command.replace(copied, str(context))]
        done = subprocess.run(step, env=environ, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            break
    return done


def test_the_build_s_steps_make_an_image_with_an_active_overlay(release: str, tmp_path: Path) -> None:
    done = build(tmp_path, plain(release), build_wheels(release))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("UCM's overlay is active: ")
    assert not (tmp_path / "wheels").exists()


def test_an_image_of_another_release_ends_the_build(release: str, tmp_path: Path) -> None:
    """The steps stop at the doctor, which names both."""
    done = build(tmp_path, plain(release), build_wheels("0.27.1"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"the overlay is for vLLM 0.27.1, but vLLM {release} is installed: vLLM will not start" in done.stdout


def test_vllm_knows_every_argument(release: str) -> None:
    objects = yaml.safe_load_all((DEPLOY / "kubernetes" / "deployment.yaml").read_text(encoding="utf-8"))
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command = [plain(release).python, "-c", PARSE, *container["args"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == '["Qwen/Qwen3-8B", 8000, 60, "UCMConnector", "kv_both"]'
    wrong = subprocess.run([*command, "--shutdown-patience=1"], capture_output=True, text=True, check=False)
    assert "--shutdown-patience" in wrong.stderr
