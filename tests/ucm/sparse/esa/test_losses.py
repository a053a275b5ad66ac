"""Workers report lost blocks to the scheduler."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.logger import get_logger
from ucm.sparse.esa.offloaded import Losses, block_key, tell_loss

if TYPE_CHECKING:
    import pytest


def test_what_any_worker_tells_is_heard_once_it_is_told() -> None:
    losses = Losses()
    assert losses.admissions() == set()
    tell_loss(losses.path, 7)
    assert losses.admissions() == {7}
    tell_loss(losses.path, 12)
    tell_loss(losses.path, 7)
    assert losses.admissions() == {7, 12}


def test_half_a_line_is_not_taken_for_a_whole_one() -> None:
    losses = Losses()
    with Path(losses.path).open("ab", buffering=0) as file:
        file.write(b"3\n41")
        assert losses.admissions() == {3}
        file.write(b"5\n")
    assert losses.admissions() == {3, 415}


def test_the_file_is_its_user_s_own_and_goes_with_its_owner() -> None:
    losses = Losses()
    path = Path(losses.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    del losses
    assert not path.exists()


def test_a_file_that_was_cleaned_up_is_made_again() -> None:
    """As by a service that deletes files in /tmp that were not used for days."""
    losses = Losses()
    tell_loss(losses.path, 7)
    tell_loss(losses.path, 8)
    assert losses.admissions() == {7, 8}
    path = Path(losses.path)
    path.unlink()
    assert losses.admissions() == {7, 8}
    tell_loss(losses.path, 9)
    assert losses.admissions() == {7, 8, 9}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_told_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        tell_loss(str(tmp_path / "none" / "file"), 1)
    finally:
        logger.removeHandler(caplog.handler)
    assert "cannot be reported to the scheduler" in caplog.text
    losses = Losses()
    Path(losses.path).unlink()
    assert losses.admissions() == set()


def test_an_offloaded_block_is_found_only_by_the_admission_that_wrote_it() -> None:
    """Its key follows from no content and no name that another request could have, too."""
    numbers = [0, 1, 2, 11, 12, 112]
    keys = {block_key(engine, admission, place) for engine in ("a", "b") for admission in numbers for place in numbers}
    assert len(keys) == 2 * len(numbers) ** 2
