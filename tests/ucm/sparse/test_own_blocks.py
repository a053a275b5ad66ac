"""Blocks with hashes of their own request in vLLM's prefix cache."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.releases import REVIEWED
from tests.ucm.integration.vllm import published as vllm
from ucm.compat import HASHERS
from ucm.sparse.blocks import keep_apart

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4
CACHE = SimpleNamespace(block_size=SIZE, hash_block_size=None)


class Tuple(NamedTuple):
    """As of 0.10.1."""

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any = None


class Request:
    """The parts of vLLM's request that hash its blocks; ``bound``: up to 0.11.2, the hasher is bound to its request."""

    def __init__(self, tokens: list[int], *, bound: bool, make: Callable[[Any, list[int]], Any]) -> None:
        self.tokens, self.make = list(tokens), make
        self.block_hashes: list[Any] = []
        if bound:
            self.get_hash_new_full_blocks = lambda: self._hash(self)
        else:
            self._block_hasher = self._hash
        self.update()

    def _hash(self, request: Any) -> list[Any]:
        assert request is self
        found = list(self.block_hashes)
        for start in range(len(found) * SIZE, len(self.tokens) - SIZE + 1, SIZE):
            found.append(self.make(found[-1] if found else None, self.tokens[start : start + SIZE]))
        return found[len(self.block_hashes) :]

    def update(self) -> None:
        bound = getattr(self, "get_hash_new_full_blocks", None)
        self.block_hashes += bound() if bound is not None else self._block_hasher(self)

    def generate(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.update()


def to_bytes(parent: Any, tokens: list[int]) -> bytes:
    return hashlib.sha256(repr((parent, tokens)).encode()).digest()


def to_tuple(parent: Any, tokens: list[int]) -> Tuple:
    return Tuple(hash((parent, tuple(tokens))), tuple(tokens))


@pytest.mark.parametrize("make", [to_bytes, to_tuple])
@pytest.mark.parametrize("bound", [False, True])
def test_blocks_of_generated_tokens_are_found_by_their_own_request_alone(make: Any, *, bound: bool) -> None:
    prompt, answer = list(range(10)), list(range(20, 40))
    plain, apart, other = (Request(prompt, bound=bound, make=make) for _ in range(3))
    for request in (apart, other):
        keep_apart(request, len(prompt), CACHE)
    for request in (plain, apart, other):
        request.generate(answer)
        if request is not plain:
            keep_apart(request, len(prompt), CACHE)
    assert apart.block_hashes[:2] == plain.block_hashes[:2]
    assert len(apart.block_hashes) == len(plain.block_hashes) == 7
    found = {*apart.block_hashes[2:], *other.block_hashes[2:], *plain.block_hashes[2:]}
    assert len(found) == 15


def test_blocks_that_have_names_already_lose_them() -> None:
    """A method may treat a prompt's last token as a generated one."""
    prompt = list(range(12))
    plain, apart = (Request(prompt, bound=False, make=to_bytes) for _ in range(2))
    keep_apart(apart, len(prompt) - 1, CACHE)
    assert apart.block_hashes[:2] == plain.block_hashes[:2]
    assert apart.block_hashes[2] != plain.block_hashes[2]


def test_hashes_may_cover_fewer_tokens_than_a_block() -> None:
    plain, apart = (Request(list(range(20)), bound=False, make=to_bytes) for _ in range(2))
    keep_apart(apart, 9, SimpleNamespace(block_size=16, hash_block_size=SIZE))
    same = [one == other for one, other in zip(plain.block_hashes, apart.block_hashes, strict=True)]
    assert same == [True, True, False, False, False]


def test_a_request_without_hashes_is_left_alone() -> None:
    keep_apart(SimpleNamespace(_block_hasher=None, block_hashes=[]), 4, CACHE)


@pytest.mark.parametrize("release", REVIEWED)
def test_where_requests_hash_their_blocks(release: str) -> None:
    attributes = vllm.attributes(release, vllm.REQUEST, "Request")
    parameters = vllm.signature(vllm.function(release, vllm.REQUEST, "Request.__init__")).parameters
    hashed = release in REVIEWED[REVIEWED.index("0.10.1.1") :]
    assert ("block_hasher" in parameters) == hashed
    assert len(attributes.intersection(HASHERS)) == hashed
