"""The tags of cache salts in keys."""

from __future__ import annotations

import hashlib
from unittest.mock import create_autospec

import pytest

from ucm.salts import NO_SALT, TAG_BYTES, is_tag_name, tag_digits, tag_name, tag_of_salt, tagged


def test_a_tag_stays_what_it_is() -> None:
    """Operators write it into configurations, and files are named by it."""
    assert tag_name(tag_of_salt("salt").hex()) == "salt-f8689533"
    assert hashlib.blake2b(b"salt", digest_size=4, person=b"ucm.salt-tag").hexdigest() == "f8689533"


def test_no_salt_is_a_tag_of_its_own() -> None:
    assert tag_of_salt(None) == tag_of_salt("") == bytes(TAG_BYTES)
    assert tag_name("00000000") == NO_SALT


def test_no_salt_has_that_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = create_autospec(hashlib.blake2b)
    digest.return_value.digest.return_value = bytes(TAG_BYTES)
    monkeypatch.setattr(hashlib, "blake2b", digest)
    assert tag_of_salt("unlucky") == b"\xff" * TAG_BYTES


def test_a_key_keeps_all_other_bytes() -> None:
    digest = bytes(range(32))
    key = tagged(digest, b"\xaa\xbb\xcc\xdd")
    assert (key[:1], key[1:5], key[5:]) == (digest[:1], b"\xaa\xbb\xcc\xdd", digest[5:])
    assert tag_digits(key) == "aabbccdd"


@pytest.mark.parametrize("name", ["salt-1a2b3c4d", "no-salt", "salt-00000001"])
def test_names_of_tags(name: str) -> None:
    assert is_tag_name(name)


@pytest.mark.parametrize(
    "name", ["", "salt", "salt-1a2b3c4", "salt-1A2B3C4D", "salt-00000000", "1a2b3c4d", "my salt\n"]
)
def test_what_is_no_tags_name(name: str) -> None:
    assert not is_tag_name(name)
