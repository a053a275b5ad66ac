"""Run vLLM's own tests without and with the overlay, and compare: `python -m tests.e2e.parity RELEASE`.

The tests come from the release's sdist, without its package, so they import the installed vLLM. Both sides run at
the same time on the same machine. Some tests fail on both without a GPU or a model hub; the criterion is that the
same tests pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.e2e.environment import plain, with_overlay
from tests.e2e.model import write_hub
from tests.e2e.processes import INSIDE
from transforms.engine.errors import OverlayError
from transforms.pipeline.sources.cache import Cache
from transforms.pipeline.sources.index import Index
from transforms.pipeline.sources.open import download
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.environment import Environment

PARITY = BUILD / "parity"
CORE = tuple(
    f"tests/v1/core/test_{name}.py"
    for name in (
        "scheduler",
        "kv_cache_utils",
        "prefix_caching",
        "single_type_kv_cache_manager",
        "output",
        "async_scheduler",
    )
)
#: All tests of the workers; those that need a GPU skip or fail on both sides.
WORKER = ("tests/v1/worker",)
SHOWN = 50


@dataclass(frozen=True)
class Side:
    """The outcome of each test in one environment.

    Attributes:
        name: ``without`` or ``with`` the overlay.
        outcomes: By test id.
    """

    name: str
    outcomes: dict[str, str]

    @property
    def passed(self) -> set[str]:
        """The tests that passed."""
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}

    def summary(self) -> str:
        """The counts in one line."""
        counts = Counter(self.outcomes.values())
        return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides and compare; return 0 only if the same tests pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.parity", description=__doc__)
    parser.add_argument("release", nargs="?", default="0.32.0")
    parser.add_argument("files", nargs="*", help="of vLLM's tests; by default those that run without a GPU")
    options = parser.parse_args(arguments)
    try:
        sides = compare(options.release, options.files)
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report(options.release, *sides)


def compare(release: str, files: Sequence[str] = ()) -> tuple[Side, Side]:
    """Run vLLM's tests without and with the overlay.

    Args:
        release: A release with a CPU build.
        files: Paths in the sdist; default: those of `CORE` and `WORKER` that the release has.

    Raises:
        OverlayError: If the sdist cannot be downloaded, or the overlay not built.
    """
    directory = PARITY / f"vllm-{release}"
    directory.mkdir(parents=True, exist_ok=True)
    root = unpack_tests(release, directory / "source")
    hub = write_hub(PARITY / "hub")
    wanted = files or [file for file in (*CORE, *WORKER) if (root / file).exists()]
    started = [
        (name, directory / f"{name}.jsonl", _start(environment, root, hub, directory / f"{name}.jsonl", wanted))
        for name, environment in (("without", plain(release)), ("with", with_overlay(release)))
    ]
    sides = []
    for name, outcomes, process in started:
        code = process.wait()
        print(f"{name} the overlay: pytest ended with {code}; its output is in {outcomes.with_suffix('.log')}")
        sides.append(Side(name, dict(json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines())))
    return sides[0], sides[1]


def report(release: str, without: Side, with_: Side) -> int:
    """Print both sides and their difference, and write them as JSON; return 0 if the same tests pass."""
    for side in (without, with_):
        print(f"{side.name:>7} the overlay: {side.summary()}")
    lost, gained = sorted(without.passed - with_.passed), sorted(with_.passed - without.passed)
    for title, tests, other in (("only without", lost, with_), ("only with", gained, without)):
        print(f"pass {title} the overlay: {len(tests)}")
        for test in itertools.islice(tests, SHOWN):
            print(f"    {test} (other side: {other.outcomes.get(test, 'not run')})")
    kept = PARITY / f"vllm-{release}.json"
    kept.write_text(
        json.dumps({"without": without.outcomes, "with": with_.outcomes, "lost": lost, "gained": gained}, indent=1),
        encoding="utf-8",
    )
    print(f"every outcome: {kept}")
    return 1 if lost or gained or not without.passed else 0


def unpack_tests(release: str, target: Path) -> Path:
    """Unpack the tests of a release's sdist, without its package.

    Raises:
        OverlayError: If the sdist cannot be downloaded.
    """
    if not (target / "tests").is_dir():
        index = Index()
        sdist = next((archive for archive in index.archives(release) if not archive.is_wheel), None)
        if sdist is None:
            raise OverlayError(f"vLLM {release} was published without an sdist", fix="name another release")
        with tarfile.open(download(sdist, Cache(), index.config)) as archive:
            for member in archive.getmembers():
                _top, _, path = member.name.partition("/")
                if path == "pyproject.toml" or path.startswith("tests/"):
                    member.name = path
                    archive.extract(member, target, filter="data")
    return target


def _start(
    environment: Environment, root: Path, hub: Path, outcomes: Path, files: Sequence[str]
) -> subprocess.Popen[bytes]:
    outcomes.unlink(missing_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UCM_", "VLLM_", "PYTHON"))}
    variables = {
        **kept,
        "HF_HOME": str(hub),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(INSIDE),
        "UCM_E2E_OUTCOMES": str(outcomes),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with outcomes.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [
                environment.python,
                "-m",
                "pytest",
                "-p",
                "outcomes",
                "-p",
                "no:cacheprovider",
                "-q",
                "--continue-on-collection-errors",
                *files,
            ],
            cwd=root,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


if __name__ == "__main__":
    sys.exit(main())
