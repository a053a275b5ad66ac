"""A pattern finds exactly its sites, under the qualified name of the enclosing definition."""

from __future__ import annotations

import pytest

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.sites import TOP_LEVEL, find_sites, site_pattern

SOURCE = b'''\
"""Talks of allocate_slots(...) and of class Fake(Scheduler), and has neither here."""
pool.allocate_slots(0)


class Scheduler(Interface[int]):
    def schedule(self):
        first = self.kv_cache_manager.allocate_slots(request, n, tokens=1)
        for request in self.waiting:
            if self.kv_cache_manager.allocate_slots(
                request,
            ):
                request.status = RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING

        def plan():
            return impl.forward(a)

        return (self.impl
                .forward(x), self.impl.backward(x), implementation.forward(x))


class Async(base.Scheduler, Mixin):
    async def schedule(self):
        return await super().schedule()


def make(cls, name):
    cls._free(x)
    return cls.allocate_slots_later(name), layers[name], cls.layers[name], cls.rpc("init", x), cls.rpc("stop")
'''


def found(*patterns: str) -> dict[str, int]:
    return find_sites(SOURCE, {"it": patterns}, "a.py").get("it", {})


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("_.allocate_slots(...)", {TOP_LEVEL: 1, "Scheduler.schedule": 2}),
        ("_.kv_cache_manager.allocate_slots(request, ...)", {"Scheduler.schedule": 2}),
        ("_.allocate_slots(_)", {TOP_LEVEL: 1, "Scheduler.schedule": 1}),
        ("_.allocate_slots(..., tokens=_)", {"Scheduler.schedule": 1}),
        ("_.status = RequestStatus.PREEMPTED", {"Scheduler.schedule": 1}),
        ("_.impl.forward(...)", {"Scheduler.schedule": 1}),
        ("impl.forward(...)", {"Scheduler.schedule.plan": 1}),
        ("def schedule", {"Scheduler.schedule": 1, "Async.schedule": 1}),
        ("def plan", {"Scheduler.schedule.plan": 1}),
        ("class (Scheduler)", {"Async": 1}),
        ("class (Interface)", {"Scheduler": 1}),
        ("_.layers[_]", {"make": 1}),
        ("_._free(...)", {"make": 1}),
        ("_.free(...)", {}),
        ('_.rpc("init", ...)', {"make": 1}),
        ("_.allocate_blocks(...)", {}),
        ("class (Fake)", {}),
    ],
)
def test_a_pattern_finds_exactly_its_sites(pattern: str, sites: dict[str, int]) -> None:
    assert found(pattern) == sites


def test_a_site_that_two_patterns_match_counts_once() -> None:
    assert found("_.allocate_slots(...)", "pool.allocate_slots(0)") == {TOP_LEVEL: 1, "Scheduler.schedule": 2}


def test_things_are_told_apart() -> None:
    wanted = {"plans": ("def plan",), "nothing": ("def nothing",), "makes": ("def make",)}
    assert find_sites(SOURCE, wanted, "a.py") == {"plans": {"Scheduler.schedule.plan": 1}, "makes": {"make": 1}}


def test_a_source_without_the_words_is_not_parsed() -> None:
    assert find_sites(b"not ( python", {"it": ("_.allocate_slots(...)",)}, "a.py") == {}


def test_a_source_that_does_not_parse_is_named() -> None:
    with pytest.raises(RuleDefinitionError, match="does not parse") as caught:
        find_sites(b"x.allocate_slots((", {"it": ("_.allocate_slots(...)",)}, "some/module.py")
    assert "some/module.py" in str(caught.value)


@pytest.mark.parametrize(("text", "what"), [("a b", "neither"), ("a; b", "not one statement"), ("_(...)", "nothing")])
def test_what_is_no_pattern_is_refused(text: str, what: str) -> None:
    with pytest.raises(RuleDefinitionError, match=what):
        site_pattern(text)


KEYED = b"""\
class Cache:
    def look(self, feature, mm_hash):
        if feature.mm_hash in self.kept:
            return self.kept[mm_hash]
        found = self.kept.get(mm_hash) or self.others.pop(feature.mm_hash, None)
        return {mm_hash: found}

    def hashed(self, request):
        return hash((request.mm_hashes[0], request.tokens))

    def counts(self, mm_hash, features):
        self.order.append(mm_hash)
        return {feature.mm_hash for feature in features}, {feature.mm_hash: 1 for feature in features}

    def beside(self, mm_hash):
        self.tell(mm_hash)
        for mm_hash in self.kept:
            if mm_hash == self.last or self.last in mm_hash:
                return mm_hash.kept["mm_hash"]
        return self.kept[mm_hash.data]
"""


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("key (mm_hash)", {"Cache.look": 5, "Cache.counts": 3}),
        ("key (mm_hashes)", {"Cache.hashed": 1}),
        ("key (data)", {"Cache.beside": 1}),
        ("key (request)", {}),
    ],
)
def test_what_finds_something_by_a_value(pattern: str, sites: dict[str, int]) -> None:
    assert find_sites(KEYED, {"it": (pattern,)}, "a.py").get("it", {}) == sites
