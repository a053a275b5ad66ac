"""How options of ``ucm store`` are written; every ``ucm`` command imports this, so it imports next to nothing."""

from __future__ import annotations

import argparse
import re

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d|w)")


def duration(text: str) -> float:
    """The seconds that a text such as ``30d`` stands for.

    Raises:
        argparse.ArgumentTypeError: It stands for none.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 90s, 15min, 12h, 30d or 4w")
    return float(found[1]) * _SECONDS[found[2]]


def size(text: str) -> int:
    """The bytes that a text such as ``100GiB`` stands for; 0 is one.

    Raises:
        argparse.ArgumentTypeError: It stands for none.
    """
    from ucm.config.units import SIZE_HELP, parse_size  # noqa: PLC0415 - see above

    try:
        return 0 if text == "0" else parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; {SIZE_HELP}") from error


def key_prefix(text: str) -> str:
    """The beginning of a key, in hexadecimal digits.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not re.fullmatch(r"[0-9a-f]{1,128}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: a key is written in the digits 0-9 and a-f")
    return text


def count(text: str) -> int:
    """A whole number from 0 on.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)
