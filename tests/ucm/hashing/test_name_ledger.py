"""A name is trusted as long as it has stood for one known content; what is forgotten is not trusted."""

from __future__ import annotations

from ucm.hashing.name_ledger import NameLedger, named

X, Y = named("x"), named("y")
ONE, OTHER = named(1), named(2)


def test_a_name_with_one_content_is_trusted() -> None:
    ledger = NameLedger()
    assert all(ledger.stands_for(name, content) for name, content in ((X, ONE), (Y, OTHER), (X, ONE)))
    assert not ledger.is_ambiguous(X)
    assert ledger.changes == 0


def test_a_name_that_was_ever_ambiguous_stays_so_until_the_cache_is_emptied() -> None:
    for second in (OTHER, None):
        ledger = NameLedger()
        assert [ledger.stands_for(X, content) for content in (ONE, second, ONE, ONE)] == [True, False, False, False]
        assert ledger.is_ambiguous(X)
        assert ledger.stands_for(Y, ONE)
        ledger.clear()
        assert ledger.stands_for(X, OTHER)


def test_a_forgotten_name_is_ambiguous() -> None:
    ledger = NameLedger(most=2)
    names = [named(number) for number in range(3)]
    for name in names:
        assert ledger.stands_for(name, ONE)
    assert [ledger.is_ambiguous(name) for name in names] == [True, False, False]
    assert not ledger.stands_for(names[0], ONE)


def test_the_name_that_was_not_used_for_longest_is_forgotten() -> None:
    ledger = NameLedger(most=2)
    for name in (X, Y, X, named("z")):
        ledger.stands_for(name, ONE)
    assert [ledger.is_ambiguous(name) for name in (X, Y)] == [False, True]


def test_the_memory_is_bounded_and_few_other_names_are_taken_for_ambiguous() -> None:
    ledger = NameLedger(most=10)
    for number in range(20_000):
        ledger.stands_for(named(number), ONE)
    assert len(ledger._contents) == 10
    assert all(ledger.is_ambiguous(named(number)) for number in range(0, 19_000, 7))
    assert sum(ledger.is_ambiguous(named("other", number)) for number in range(10_000)) == 0
