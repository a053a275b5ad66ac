"""Authenticate blocks with a secret key, so that nobody without the key can change or replace them unnoticed.

Every layer slice and every header gets a tag: 16 bytes of BLAKE3 in its keyed mode, which is a message authentication
code (O'Connor et al., "BLAKE3: one function, fast everywhere", 2020). The header's tag covers the tags of the layer
slices, the block's key, its namespace and its geometry, so that neither blocks nor layer slices can be exchanged.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from blake3 import blake3

from ucm.errors import ConfigError
from ucm.store.config import read_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.store.base import Buffer

#: The shortest key, in characters: 128 bits where each is a hexadecimal digit.
MIN_CHARACTERS = 32
#: The fewest different characters of a key: one in 28 million random keys of 32 hexadecimal digits has fewer.
MIN_DIFFERENT = 8
TAG_BYTES, FINGERPRINT_BYTES = 16, 8


class Authenticator:
    """Computes the tags of one key. Any thread may call it.

    Args:
        secret: The key.
    """

    def __init__(self, secret: str) -> None:
        self._of_slices = _derived(secret, "layer slice")
        self._of_headers = _derived(secret, "header")
        #: Identifies the key without revealing it.
        self.fingerprint = _derived(secret, "fingerprint")[:FINGERPRINT_BYTES]

    def slice_tag(self, pieces: Iterable[Buffer]) -> bytes:
        """Return the tag of a layer slice."""
        found = blake3(key=self._of_slices)
        for piece in pieces:
            found.update(piece.cast("B"))
        return found.digest(TAG_BYTES)

    def header_tag(self, header: Buffer) -> bytes:
        """Return the tag of everything before it in a header."""
        return blake3(header, key=self._of_headers).digest(TAG_BYTES)


@cache
def read_authenticator(file: str, owners: frozenset[int] = frozenset()) -> Authenticator:
    """Return the authenticator for the key in a file, which a process reads once.

    Args:
        file: The path of the file; ``~`` is expanded. Its first line is the key.
        owners: The ids of other users to whom it may belong.

    Raises:
        ConfigError: The file cannot be read, others can read or change it, or the key is too short, or not random.
    """
    where = "store: authentication_key_file"
    secret = read_secret(file, None, where, is_key=True, owners=owners)
    problem = _problem(secret)
    if problem:
        fix = f"make one with `(umask 077; openssl rand -hex 32 > {file})`, the same for all engines"
        raise ConfigError(problem, where=f"{where}: {file}", fix=fix)
    return Authenticator(secret)


def _problem(secret: str) -> str:
    """Return why a key cannot be used; empty if it can. What an editor adds unseen must not make another key."""
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        return "the key has blanks or characters other than printable ASCII in its line"
    if len(secret) < MIN_CHARACTERS:
        return f"the key has {len(secret)} characters, but needs at least {MIN_CHARACTERS}"
    different = len(set(secret))
    if different < MIN_DIFFERENT:
        return f"the key is not random: it has only {different} different character{'' if different == 1 else 's'}"
    return ""


def _derived(secret: str, purpose: str) -> bytes:
    return blake3(secret.encode(), derive_key_context=f"ucm.store, block format 2: {purpose}").digest()
