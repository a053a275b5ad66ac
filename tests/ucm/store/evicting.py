"""Evict as an evictor does, in tests that are not about leases."""

from __future__ import annotations

from functools import partial

from ucm.store.posix.scan import evict
from ucm.store.tier import LeaseRules

#: Whatever time a test gives a file counts, and nothing is pinned.
evict_unpinned = partial(evict, leases=LeaseRules(1 << 62), most_pinned=0.0)
