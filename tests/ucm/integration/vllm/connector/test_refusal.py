"""An error that keeps a connector from starting is logged in one record, and reaches vLLM unchanged."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import pytest

from ucm.config import load_connector_config
from ucm.errors import ConfigError
from ucm.integration.vllm.connector.failures import refusals_logged
from ucm.logger import FORMAT, get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The log, as our handler writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(FORMAT))
    get_logger().addHandler(handler)
    yield stream
    get_logger().removeHandler(handler)


def test_all_of_it_is_one_record(log: io.StringIO) -> None:
    with pytest.raises(ConfigError) as caught, refusals_logged("UCM.Config"):
        load_connector_config({"store": {"pipeline": "Empty"}, "conector": "layerwise", "hit_ratio": 2})
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("ERROR ")
    assert lines[0].endswith("[UCM.Config] refused: 2 settings cannot be used")
    assert lines[1:] == [
        "1. 'conector' is not a setting",
        "  where: kv_connector_extra_config: conector = 'layerwise'",
        "  to do: did you mean 'connector'?",
        "2. more than 1.0",
        "  where: kv_connector_extra_config: hit_ratio = 2",
        "  to do: write 1.0 or less",
    ]
    assert "\n".join(lines[1:]) in str(caught.value)


def test_an_error_of_others_is_theirs_to_tell(log: io.StringIO) -> None:
    with pytest.raises(OSError, match="somebody else's"), refusals_logged("UCM.Config"):
        raise OSError("somebody else's")
    with refusals_logged("UCM.Config"):
        pass
    assert log.getvalue() == ""
