"""Mark each block's key with a digest of its request's cache salt, so that tenants can be told apart by keys alone.

Four bytes of a key are the salt's *tag*. The first byte and the last ones stay as they were hashed: they say in which
directory a block lies. The tag is the same for all models, ranks, KV-cache groups and engines, and has a name for
people: ``salt-1a2b3c4d``, or ``no-salt``.

Two salts have the same tag once in four billion pairs. Then they are accounted for together, and no more: the rest of
the key still keeps their blocks apart.
"""

from __future__ import annotations

import hashlib
import re

#: The bytes of a key that are the tag; in the name of a block's file, whose directory has the first byte, the first
#: ``2 * TAG_BYTES`` digits.
TAG_BYTES = 4
_FIRST, _END = 1, 1 + TAG_BYTES
#: The name of the tag of requests without a salt, and what precedes the digits of any other.
NO_SALT, _SALT = "no-salt", "salt-"
_NONE = bytes(TAG_BYTES)
_NAME = re.compile(rf"{NO_SALT}|{_SALT}(?!0{{{2 * TAG_BYTES}}})[0-9a-f]{{{2 * TAG_BYTES}}}")


def tag_of_salt(salt: str | None) -> bytes:
    """Return the tag of a ``cache_salt``; an empty one is none."""
    if not salt:
        return _NONE
    data = salt.encode("utf-8", "surrogatepass")
    tag = hashlib.blake2b(data, digest_size=TAG_BYTES, person=b"ucm.salt-tag").digest()
    return tag if tag != _NONE else b"\xff" * TAG_BYTES


def tagged(digest: bytes, tag: bytes) -> bytes:
    """Return a digest as a key with a tag."""
    return digest[:_FIRST] + tag + digest[_END:]


def tag_name(digits: str) -> str:
    """Return the name of a tag, given its hexadecimal digits."""
    return f"{_SALT}{digits}" if digits.strip("0") else NO_SALT


def tag_digits(key: bytes) -> str:
    """Return the hexadecimal digits of a key's tag."""
    return key[_FIRST:_END].hex()


def is_tag_name(text: str) -> bool:
    """Return whether a text is the name of a tag."""
    return _NAME.fullmatch(text) is not None
