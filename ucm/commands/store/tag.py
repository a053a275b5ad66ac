"""``ucm store tag``: print the tag of a cache salt, so that a configuration names no salt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ucm.commands.options import answer
from ucm.errors import UcmError
from ucm.salts import tag_name, tag_of_salt

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    """Read a salt from standard input, where neither other users nor the shell's history see it, and print its tag.

    Raises:
        UcmError: There is no salt.
    """
    salt = sys.stdin.readline().rstrip("\r\n")
    if not salt:
        raise UcmError(
            "there is no salt on standard input", fix="write it there, in one line: ucm store tag < salt.txt"
        )
    tag = tag_name(tag_of_salt(salt).hex())
    answer(options, {"tag": tag}, [tag])
    return 0
