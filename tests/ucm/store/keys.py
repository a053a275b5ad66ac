"""Authentication keys for tests."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def secret(name: str) -> str:
    """Return a key, the same for the same name."""
    return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()


def key_file(path: Path, text: str = "") -> str:
    """Write a key, or this text, into a file that only its owner can read; return its path."""
    path.touch(0o600)
    path.write_text(f"{text or secrets.token_hex(32)}\n", encoding="utf-8")
    return str(path)
