"""``ucm store``: inspect, verify and clean the directories of a store, also while engines use them; see docs/store.md.

With ``--json`` each subcommand prints one object. Sizes are in bytes, times in ISO 8601 in UTC, ``tier`` is ``posix``,
``dram``, ``redis``, ``mooncake`` or ``s3``, and ``directory`` is a path as given.

``stat``: ``directories``, each with ``directory``, ``tier``, ``problem`` (null if it can be read), ``blocks``,
``bytes``, ``side_bytes``, ``free_bytes`` and ``total_bytes`` of its file system, ``bare`` (whether it contains no part
of a store), ``unmarked`` (paths), ``salts``, each with ``salt`` (its tag), ``blocks``, ``bytes``, and ``namespaces``;
``tiers``, each with ``tier``, ``bytes``, ``capacity_bytes``; ``servers``, the tiers on servers, each with ``tier``,
``answers``, ``said`` and ``namespaces``, of our own tiers, each with ``digest``, ``namespace`` (null if no directory
gives the name), ``blocks``, ``bytes``. A directory's namespace has ``namespace``, ``identity``, ``blocks``,
``bytes``, ``uncompressed_bytes`` (null if unknown), ``leased_bytes``, ``pinned_bytes`` (among the former),
``oldest_use``, ``newest_use``, ``temporaries``, ``left_behind``, ``quarantined``, ``side_bytes``.

``ls``: ``blocks``, each with ``directory``, ``tier``, ``namespace``, ``key``, ``path``, ``bytes``, ``used``;
``matching`` and ``matching_bytes`` also count those beyond the limit.

``verify``: ``blocks``, ``bytes``, ``seconds``, ``bytes_per_second``, ``vanished``, ``authentic`` (blocks authenticated
by the key of the configuration; null if it names none), ``damaged`` by cause, and ``problems``, each with
``directory``, ``tier``, ``namespace``, ``key``, ``path``, ``cause``, ``reason``, ``quarantined``; ``directory`` is the
name of a tier on servers; ``unreadable``, directories and such tiers with ``directory``, ``tier``, ``reason``;
``bare``, those without a store, and ``unmarked``, namespaces without their marker (paths).

``lookup``: ``tokens``, ``found_tokens`` that an engine would load, and ``groups``, each with ``group``, ``namespace``,
``block_tokens``, ``units`` (``blocks`` or ``chunks``), ``silent`` (tiers that do not answer, by cause) and ``blocks``,
each with ``key`` and ``tiers``.

``retain``, ``pin``: ``until``; ``tiers``, each with ``blocks`` (stored), ``leased`` and ``refused`` (the reasons, of
each block that this user cannot lease); ``without``, tiers that have no leases. ``unpin``: ``tiers``, each with
``blocks``, ``ended`` (leases) and ``refused``; ``without``. ``drop``: ``dropped`` blocks by tier,
and ``failed``, the reasons of tiers that could not delete. ``tag``: ``tag``.

``prefetch``: ``tier``, the first one; ``tokens`` that an engine would load, ``blocks`` that it needs for that, how many
are ``there`` and ``copied``; ``failed``, reasons by tier. ``demote``: ``tier``, ``lower`` (the other tiers),
``deleted`` and ``kept`` blocks, ``failed``.

``gc``: ``dry_run``, ``deleted`` (with ``dry_run``: what would be deleted), a list of ``directory``, ``tier``,
``namespace``, ``kind``, ``count``, ``bytes``; ``spared`` (in use), ``failed``, each with ``path`` and ``reason``.

``bench``: ``workload``, ``seconds`` (of each round, by operation), ``shares`` (of the plain operation ``of``, by
operation).
"""
