"""The command line: help, errors, terminals, pipes."""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import pytest

from tests.system import require_root
from tests.ucm.commands.store.conftest import BIG, SMALL
from ucm.commands.options import at_least
from ucm.commands.store import verify
from ucm.commands.store.command import duration, key_prefix, size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ucm.commands.store.conftest import Answer, Kept
    from ucm.store.authentication import Authenticator
    from ucm.store.inspection import StoredBlock

UCM = [sys.executable, "-m", "ucm", "store"]
COMMANDS = ("stat", "ls", "verify", "gc")
HEAVY = {"numpy", "pydantic", "yaml", "tqdm", "xxhash"}


def on_terminal(words: list[str], typed: str = "") -> tuple[int, str]:
    """Run the command in a pseudo-terminal; return its exit code and output."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([*UCM, *words], stdin=its, stdout=its, stderr=its)
    os.close(its)
    os.write(mine, typed.encode())
    printed = b""
    try:
        while chunk := os.read(mine, 65536):
            printed += chunk
    except OSError:  # the terminal's other end is closed
        pass
    os.close(mine)
    return process.wait(), printed.decode().replace("\r\n", "\n")


def test_the_other_commands_need_no_packages() -> None:
    code = f"import sys, ucm.cli; print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_must_be_there(command: str, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    answer = ask(command, "--directory", tmp_path / "nowhere")
    assert answer.code == 2
    assert answer.err.startswith("ucm: this directory cannot be read: No such file or directory\n  where: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_one_place_must_be_named(command: str, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    assert ask(command).code == 2
    assert ask(command, "--directory", tmp_path, "--config", tmp_path).code == 2
    assert ask(command, "--help").code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_made_in_a_store(command: str, kept: Kept, ask: Callable[..., Answer]) -> None:
    before = sorted(kept.root.rglob("*"))
    assert ask(command, "--directory", kept.root).code == 0
    assert sorted(kept.root.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_of_another_user(command: str, kept: Kept) -> None:
    require_root("only root can become another user")
    for parent in kept.root.parents[:3]:
        parent.chmod(0o711)
    words = ["store", command, "--directory", str(kept.root)]
    become = "os.setgid(65534); os.setuid(65534)"
    program = f"import os; from ucm.cli import main; import ucm.commands.store.{command}; {become}; exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


def test_progress_on_a_terminal(kept: Kept) -> None:
    code, printed = on_terminal(["verify", "--directory", str(kept.root)])
    assert code == 0
    assert "reading: " in printed
    assert "Every block is as it was written." in printed


def test_no_progress_elsewhere(kept: Kept) -> None:
    done = subprocess.run([*UCM, "verify", "--directory", str(kept.root)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("yes\n", 0), ("n\n", 4), ("\n", 4)])
def test_a_terminal_is_asked_before_anything_is_deleted(kept: Kept, typed: str, left: int) -> None:
    code, printed = on_terminal(["gc", "--all", "--namespace", SMALL, "--directory", str(kept.root)], typed)
    assert code == 0
    assert "4 files to be deleted, 4 blocks among them: 528 KiB.\nDelete this? [y/N] " in printed
    assert ("Nothing was deleted." in printed) == bool(left)
    assert len(kept.blocks(SMALL)) == left


@pytest.mark.parametrize("option", ["--yes", "--json", "--dry-run"])
def test_a_terminal_is_not_asked_needlessly(kept: Kept, option: str) -> None:
    code, printed = on_terminal(["gc", option, "--to", "0", "--directory", str(kept.root)])
    assert code == 0
    assert "Delete this?" not in printed
    assert len(kept.blocks(BIG)) == (10 if option == "--dry-run" else 0)


def test_a_reader_that_has_enough(kept: Kept) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*UCM, "ls", "--json", "--directory", str(kept.root)], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_is_no_traceback(kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(
        block: StoredBlock, authenticator: Authenticator | None = None, authentic: Callable[[], object] = int
    ) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "check_block", interrupt)
    answer = ask("verify", "--directory", kept.root)
    assert (answer.code, answer.err) == (130, "ucm: stopped\n")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15min", 900), ("1.5h", 5400), ("30d", 2_592_000), ("4w", 2_419_200)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("1048576", 1 << 20), ("1024B", 1024), ("4MiB", 4 << 20), ("1.5 GB", 1_500_000_000)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((duration, text) for text in ("", "30", "d", "-1d", "1y", "1 d", "5m")),
        *((size, text) for text in ("", "-1", "5G", "x", "1e3", "20", "010GiB", "1:30", "٣GiB", "99999999٣")),
        *((key_prefix, text) for text in ("", "xyz", "AB", "a" * 129)),
        *((at_least(0), text) for text in ("", "-1", "1.0", "x")),
    ],
)
def test_what_cannot_be_read(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)
