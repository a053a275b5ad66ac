"""What errors tell the operator to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.errors import pip_of

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = "/opt/env/bin/python"


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ("home = /usr/bin\nuv = 0.13.9\nversion_info = 3.11.7\n", f"UV_PYTHON={PYTHON} uv pip"),
        ("home = /home/uv = /bin\ncommand = uv = 3\n", f"{PYTHON} -m pip"),
        (None, f"{PYTHON} -m pip"),
    ],
)
def test_an_environment_of_uv_contains_no_pip(tmp_path: Path, settings: str | None, command: str) -> None:
    if settings is not None:
        (tmp_path / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    assert pip_of(str(tmp_path), PYTHON) == command
