"""One logger for everything that UCM says in a vLLM process.

``UNIFIED_CACHE_LOG_LEVEL`` sets its level (``DEBUG``, ``INFO``, ``WARNING``, ``ERROR``; ``INFO`` by default). Messages
start with their area in brackets, for instance ``[UCM.Patch]``, and carry the process id.
"""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "UNIFIED_CACHE_LOG_LEVEL"
FORMAT = "%(levelname)s %(asctime)s pid=%(process)d %(processName)s %(message)s"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger() -> logging.Logger:
    """UCM's logger, set up at its first use in a process."""
    logger = logging.getLogger("ucm")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
        wanted = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
        logger.setLevel(wanted if wanted in LEVELS else "INFO")
        if wanted not in LEVELS:
            logger.warning("[UCM] %s=%r is not one of %s; INFO is used", LEVEL_VARIABLE, wanted, ", ".join(LEVELS))
    return logger
