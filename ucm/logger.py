"""The loggers of UCM, one per module, below ``ucm``.

They follow vLLM's logging configuration:

- The level is vLLM's (``VLLM_LOGGING_LEVEL``), unless ``UNIFIED_CACHE_LOG_LEVEL`` sets another.
- If vLLM's handlers have a formatter that is not vLLM's own (``VLLM_LOGGING_CONFIG_PATH``, JSON), UCM's records go to
  these handlers.
- With ``VLLM_CONFIGURE_LOGGING=0`` they go to the root logger's handlers, as vLLM's do.
- Otherwise they go to vLLM's stream, in a format with process name and pid, which older releases' own format lacks.

A logging configuration that names the logger ``ucm`` takes precedence. Each message starts with its area in brackets,
for instance ``[UCM.Patch]``.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

ROOT = "ucm"
LEVEL_VARIABLE = "UNIFIED_CACHE_LOG_LEVEL"
VLLM_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
VLLM_CONFIGURES = "VLLM_CONFIGURE_LOGGING"
#: The package of vLLM's own formatters.
VLLM_FORMATTERS = "vllm.logging_utils"
FORMAT = "%(levelname)s %(asctime)s pid=%(process)d %(processName)s %(message)s"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class VllmHandler(logging.Handler):
    """Passes records to vLLM's handlers, found anew for each record: vLLM may be configured after the first one.

    Attributes:
        chosen: The level that UCM last set for its loggers; any other level was set by someone else.
    """

    chosen = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record once to each handler."""
        handlers = logging.getLogger("vllm").handlers
        if os.environ.get(VLLM_CONFIGURES) == "0":
            places = logging.getLogger().handlers
        else:
            places = [handler for handler in handlers if not _is_vllms(handler)]
        # The handlers' own levels are bypassed: UCM's level may be lower than vLLM's.
        for place in places or [_own(handlers)]:
            place.handle(record)


def get_logger(name: str = ROOT) -> logging.Logger:
    """Return a logger of UCM; the first call in a process sets them up."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        root.addHandler(VllmHandler())
        root.propagate = False
        wanted = os.environ.get(LEVEL_VARIABLE)
        if wanted is not None and wanted.upper() not in LEVELS:
            root.warning("[UCM] %s=%r is not one of %s; vLLM's is used", LEVEL_VARIABLE, wanted, ", ".join(LEVELS))
    ours = root.handlers[0]
    if isinstance(ours, VllmHandler) and root.level in {logging.NOTSET, ours.chosen}:
        ours.chosen = _level()
        root.setLevel(ours.chosen)
    logger = logging.getLogger(name)
    logger.disabled = False  # a logging configuration may disable the loggers that it does not name
    return logger


def _level() -> int:
    """Return UCM's own level, or vLLM's, which may change after the first record."""
    wanted = os.environ.get(LEVEL_VARIABLE, "").upper()
    if wanted in LEVELS:
        return int(getattr(logging, wanted))
    of_vllm = os.environ.get(VLLM_LEVEL_VARIABLE, "").upper()
    default = int(getattr(logging, of_vllm)) if of_vllm in LEVELS else logging.INFO
    return logging.getLogger("vllm").level or default


def _is_vllms(handler: logging.Handler) -> bool:
    """Return whether a handler writes vLLM's default format, or nothing."""
    formatter = type(handler.formatter)
    return isinstance(handler, logging.NullHandler) or formatter.__module__.startswith(VLLM_FORMATTERS)


def _own(handlers: list[logging.Handler]) -> logging.Handler:
    """Return a handler for UCM's format on vLLM's stream."""
    streams = [handler.stream for handler in handlers if isinstance(handler, logging.StreamHandler)]
    stream: Any = streams[0] if streams else sys.stderr
    found = logging.StreamHandler(stream)
    found.setFormatter(logging.Formatter(FORMAT))
    return found
