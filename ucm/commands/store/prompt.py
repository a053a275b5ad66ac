"""The commands about one prompt: ``lookup``, ``retain``, ``pin``, ``unpin``, ``prefetch``, ``demote`` and ``drop``.

Each is a method of `Prompt` that returns what ``--json`` prints, and `ucm.commands.store.serve` answers.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.clock import SYSTEM
from ucm.commands.options import answer, many, quieten, read_prompt, table
from ucm.commands.store.text import iso
from ucm.config.document import FILE_KEY
from ucm.config.load import load_connector_config
from ucm.config.settings import format_size
from ucm.errors import ConfigError, UcmError
from ucm.hashing.request_content import RequestContent
from ucm.integration.vllm.connector.kv_cache import longest_hit
from ucm.integration.vllm.weightless import describe_engine
from ucm.salts import tag_name
from ucm.store.base import BlockKey, BlockMissingError, StoreError
from ucm.store.config import read_secret
from ucm.store.factory import authenticator_of, back_end_class, is_tier, open_store, open_tier
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import status_of
from ucm.store.posix.scan import StoredFile, lost_pins, scan
from ucm.store.posix.space import PINNED_SHARE, Usage, smaller
from ucm.store.shares import Shares
from ucm.store.tier import LeaseRules

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.weightless import EngineFacts, StoredGroup
    from ucm.store.config import StoreConfig
    from ucm.store.tier import Tier

#: Blocks that are copied at once, as most media serve some requests sooner together than one after the other.
_THREADS = 4


def describe(config: Path, model: Path, engine_args: Mapping[str, Any]) -> tuple[ConnectorConfig, EngineFacts]:
    """Return the settings of an engine, of any number of ranks, and what it would name and store.

    Args:
        config: A file with the connector's settings.
        model: The model's directory.
        engine_args: The engine's other arguments, as vLLM's ``EngineArgs`` names them: ``dtype``, ``block_size``,
            ``kv_cache_dtype`` and others are part of the namespace.

    Raises:
        ConfigError: A setting is wrong.
        UcmError: There is no such model, or vLLM is not installed or refuses it.
    """
    extra = {FILE_KEY: str(config.absolute())}
    return load_connector_config(extra), describe_engine(model, extra, engine_args)


@dataclass(frozen=True)
class FoundBlocks:
    """Where the blocks of a prompt are stored, of one KV-cache group.

    Args:
        stored: The group.
        keys: The whole blocks of the prompt, in order.
        tiers: For each tier of the pipeline whether it has each block, of all ranks.
        present: Whether each block is stored, of all ranks, in any tier.
        silent: The tiers that did not answer, with the causes; they have nothing.
    """

    stored: StoredGroup
    keys: tuple[BlockKey, ...]
    tiers: Mapping[str, Sequence[bool]]
    present: Sequence[bool]
    silent: Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what an engine would store of it.

    Its methods raise a ``UcmError`` if the engine would not cache this prompt, or a tier cannot be opened.

    Args:
        settings: The engine's settings.
        facts: What the engine would name and store.
        token_ids: The prompt's tokens.
        salt: The ``cache_salt`` of its requests; empty for none.
    """

    settings: ConnectorConfig
    facts: EngineFacts
    token_ids: Sequence[int]
    salt: str = ""

    @property
    def config(self) -> StoreConfig:
        """The options of the store."""
        return self.settings.store.as_store_config()

    def lookup(self) -> dict[str, Any]:
        """Show which blocks of a prompt are stored, and in which tiers."""
        found, loaded = self._find()
        groups = [
            {
                "group": one.stored.group.index,
                "namespace": one.stored.namespace,
                "block_tokens": one.stored.group.chunk_tokens,
                "units": one.stored.group.stored_as,
                "silent": dict(one.silent),
                "blocks": [
                    {"key": key.hex(), "tiers": [name for name, there in one.tiers.items() if there[at]]}
                    for at, key in enumerate(one.keys)
                ],
            }
            for one in found
        ]
        return {"tokens": len(self.token_ids), "found_tokens": loaded, "groups": groups}

    def retain(self, seconds: float) -> dict[str, Any]:
        """Evict the blocks of a prompt after all others, for a time."""
        return self._lease(seconds, pin=False)

    def pin(self, seconds: float) -> dict[str, Any]:
        """Do not evict the blocks of a prompt, for a time."""
        return self._lease(seconds, pin=True)

    def unpin(self, from_token: int = 0) -> dict[str, Any]:
        """End the leases of the blocks of a prompt, pinned or retained."""
        return self._by_tier(0.0, "ended", from_token=from_token)

    def prefetch(self) -> dict[str, Any]:
        """Copy the blocks of a prompt into the first tier, before it is asked."""
        # Blocks are verified as they are read, and decompressed. All ranks' blocks are copied.
        first, lower = self._tiers()
        found, tokens = self._find()
        config, authenticator = self.config, authenticator_of(self.config, of_tool=True)
        compresses = config.tiers.get(first, {}).get("compression", "none") != "none"
        if compresses and any(one.stored.geometry_of_all is None for one in found):
            raise UcmError(
                "blocks of several ranks cannot be prefetched into a tier that compresses",
                where=f"store: tiers: {first}: compression",
                fix="let the engine copy them as it uses them",
            )
        counts = dict.fromkeys(("blocks", "there", "copied"), 0)
        failed, silent = dict[str, str](), dict[str, str]()
        if tokens < self._hit(found, [[True] * len(one.keys) for one in found]):  # a silent tier may have the rest
            silent = {
                name.lower(): f"does not answer: {causes}" for one in found for name, causes in one.silent.items()
            }
        nbytes, moves = 0, []
        with ExitStack() as stack:
            for one in found:
                stored = one.stored
                depths = {one.keys[chunk]: stored.group.depth(chunk) for chunk in stored.group.needed(0, tokens)}
                # Without the geometry, which may differ between ranks, a block's own header suffices to read it.
                how = authenticator, stored.geometry_of_all
                for namespace in stored.ranks if depths else ():
                    top, *others = _opened(stack, config, (first, *lower), namespace, *how)
                    counts["blocks"] += len(depths)
                    if (absent := _lacking(top, list(depths), failed)) is not None:
                        nbytes += len(depths) * _nbytes(others, absent, failed)
                        moves.append((top, others, depths, absent))
            capacity = moves[0][0].stats().capacity_bytes if moves else None
            if capacity is not None and nbytes > capacity:
                raise UcmError(
                    f"these blocks take {format_size(nbytes)}, and {first} may hold {format_size(capacity)}",
                    where="store",
                    fix=f"raise the capacity of {first}, or prefetch a shorter prompt",
                )
            threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
            for top, others, depths, absent in moves:
                for reasons in threads.map(partial(_copy, top, others), absent):
                    counts["copied"] += not reasons
                    failed = reasons | failed  # the first reason says most: a damaged block is then missing
                if (absent := _lacking(top, list(depths), failed)) is not None:
                    counts["there"] += len(depths) - len(absent)
                top.renew(depths)
        # What one tier could not give, another one, or an engine, may have given.
        return {"tier": first, "tokens": tokens, **counts, "failed": failed | silent if _lacks(counts) else silent}

    def demote(self) -> dict[str, Any]:
        """Delete the blocks of a prompt from the first tier, if another one has them."""
        first, lower = self._tiers()
        deleted, kept, failed = 0, 0, dict[str, str]()
        for namespace, depths in self._ranks():
            with ExitStack() as stack:
                tier, *others = tiers = _opened(stack, self.config, (first, *lower), namespace)
                try:
                    absent = set(_absent(tier, list(depths)))
                    there = alone = [key for key in depths if key not in absent]
                    for tier in others:
                        alone = _absent(tier, alone)
                    tier, staying = tiers[0], set(alone)
                    deleted += tier.drop([key for key in there if key not in staying])
                    kept += len(alone)
                except StoreError as error:
                    failed[tier.name] = error.what
        return {"tier": first, "lower": lower, "deleted": deleted, "kept": kept, "failed": failed}

    def drop(self, from_token: int = 0) -> dict[str, Any]:
        """Delete the blocks of a prompt from all tiers."""
        config = self.config
        dropped, failed = dict.fromkeys(config.parts, 0), dict[str, str]()
        for namespace, depths in self._ranks(from_token):
            for name in config.parts:
                if not is_tier(back_end_class(name)):
                    failed[name] = "this store cannot delete single blocks"
                    continue
                try:
                    with closing(open_tier(config, name, namespace)) as tier:
                        dropped[name] += tier.drop(list(depths))
                except (ConfigError, StoreError) as error:
                    failed[name] = str(error).splitlines()[0]
        return {"dropped": dropped, "failed": failed}

    def _groups(self) -> Iterator[tuple[StoredGroup, list[BlockKey]]]:
        """Yield each KV-cache group with the keys of the prompt's whole chunks, in order."""
        content, hasher = RequestContent(salt=self.salt) if self.salt else None, self.facts.hasher
        for stored in self.facts.stored:
            size = stored.group.chunk_tokens
            try:
                keys = hasher.generate_block_hashes(list(self.token_ids), size, content)
            except ValueError as error:
                raise UcmError(f"an engine would not cache this prompt: {error}") from error
            yield stored, [BlockKey(key) for key in keys]

    def _ranks(self, from_token: int = 0) -> Iterator[tuple[str, dict[BlockKey, int]]]:
        """Yield each rank's namespace with the depths of its chunks, except those that have one of the first tokens."""
        for stored, keys in self._groups():
            first = -(-from_token // stored.group.chunk_tokens)
            depths = {key: stored.group.depth(chunk) for chunk, key in enumerate(keys[first:], first)}
            yield from ((namespace, depths) for namespace in stored.ranks if depths)

    def _find(self) -> tuple[list[FoundBlocks], int]:
        """Look up every block in every tier, without loading; also return how many tokens an engine would load."""
        config, found = self.config, []
        for stored, keys in self._groups():
            there: Any = np.zeros((len(config.parts), len(stored.ranks), len(keys)), np.bool_)
            silent = {}
            for tier, name in enumerate(config.parts):
                alone = replace(
                    config, pipeline=name, tiers={one: of for one, of in config.tiers.items() if one == name}
                )
                for rank, namespace in enumerate(stored.ranks):
                    with open_store(alone, namespace, None) as store:
                        there[tier, rank] = store.lookup(keys)
                        failures = [cause for stats in store.stats().values() for cause in stats.failures]
                    if failures:
                        silent[name] = ", ".join(failures)
            tiers = dict(zip(config.parts, there.all(axis=1).tolist(), strict=True))
            found.append(FoundBlocks(stored, tuple(keys), tiers, there.any(axis=0).all(axis=0).tolist(), silent))
        return found, self._hit(found, [one.present for one in found])

    def _hit(self, found: Sequence[FoundBlocks], present: Sequence[Sequence[bool]]) -> int:
        """Return how many tokens an engine with an empty KV cache would load if these blocks were stored."""
        settings, count = self.settings, len(self.token_ids)
        groups = [one.stored.group for one in found]
        limit = min(count - 1, int(settings.hit_ratio * count))
        step = int(np.lcm.reduce([group.chunk_tokens for group in groups]))
        tokens = longest_hit(groups, present, limit, step) if count else 0
        return tokens if tokens >= settings.min_hit_tokens else 0

    def _lease(self, seconds: float, *, pin: bool) -> dict[str, Any]:
        """Lease the blocks.

        Raises:
            UcmError: The lease would be too long, or these pins beyond those that the prompt's salt may have.
        """
        longest = self.config.lease_seconds
        if seconds > longest:
            raise UcmError(
                f"a lease of {seconds:g} seconds is too long: the longest has {longest:g}",
                where="the time",
                fix="shorten it, or raise store: lease_seconds for all engines",
            )
        until = SYSTEM.time() + seconds
        if pin and "Posix" in self.config.parts:  # refuse pins that an evictor would not keep
            check_pins(self.config, dict(self._ranks()), until)
        return {"until": iso(until), **self._by_tier(until, "leased", pin=pin)}

    def _by_tier(self, until: float, done: str, *, pin: bool = False, from_token: int = 0) -> dict[str, Any]:
        """Call ``Tier.lease`` for each tier that has leases; return its counts, and the names of the others."""
        config = self.config
        back_ends = {name: back_end_class(name) for name in config.parts}
        tiers: dict[str, dict[str, Any]] = {
            name: {"blocks": 0, done: 0, "refused": []}
            for name, one in back_ends.items()
            if is_tier(one) and one.leases
        }
        for namespace, depths in self._ranks(from_token):
            for name, counts in tiers.items():
                with closing(open_tier(config, name, namespace)) as tier:
                    found = tier.lease(depths, until, pinned=pin)
                counts["blocks"] += found.stored
                counts[done] += found.leased
                counts["refused"] += map(str, found.refused)
        return {"tiers": tiers, "without": [name for name in config.parts if name not in tiers]}

    def _tiers(self) -> tuple[str, list[str]]:
        """Return the name of the first tier and those of the others.

        Raises:
            UcmError: There are no others, or the store is not made of tiers.
        """
        config = self.config
        first, *lower = config.parts
        if not lower or not all(is_tier(back_end_class(name)) for name in config.parts):
            raise UcmError(
                f"the store {config.pipeline!r} has one tier",
                where="store: pipeline",
                fix="put a faster tier before it, for instance Dram|Posix",
            )
        return first, lower


def check_pins(
    config: StoreConfig, blocks: Mapping[str, Iterable[BlockKey]], until: float, *, clock: Clock = SYSTEM
) -> None:
    """Refuse pins if an evictor would only retain some of a salt's blocks, once these are pinned.

    Args:
        config: The store's options.
        blocks: The blocks to pin, all of one salt, by namespace.
        until: When these pins end, in seconds since the epoch.
        clock: Tells which pins have ended.

    Raises:
        UcmError: It would.
    """
    rules, shares, now = LeaseRules.of(config), Shares.of(config), int(clock.time() * 1e9)
    for directory in config.directories:
        with suppress(OSError):  # who leases blocks in this directory is told what is wrong with it
            new = []
            for path in (Layout(directory, name).block(key) for name, keys in blocks.items() for key in keys):
                with suppress(FileNotFoundError):
                    status = status_of(path)
                    if not rules.is_pinned(status.st_mtime_ns, now):
                        new.append(StoredFile(path, status.st_size, int(until * 1e9)))
            root = os.path.realpath(directory)
            state = Usage(root).read()
            limit = smaller(config.directory_bytes, state.limit if state else None)
            if limit is None or not new:
                continue
            there = scan(root, clock=clock).files
            pinned = [one for one in there if not one.damaged and rules.is_pinned(one.used_ns, now)]
            account, salt = shares.account(new[0].tag), tag_name(new[0].tag)
            lost = [one for whose, one in lost_pins([*new, *pinned], limit * PINNED_SHARE, shares) if whose == account]
            if not lost:
                continue
            held = sum(file.held for file in pinned if shares.account(file.tag) == account)
            added = sum(file.held for file in new)
            most = held + added - sum(file.held for file in lost)
            raise UcmError(
                f"{salt if account == salt else f'{salt}, with all salts without a weight,'} may pin "
                f"{format_size(most)} beside what others have pinned; it has {format_size(held)} pinned, "
                f"and this adds {format_size(added)}",
                where=root,
                fix="pin less, end other pins of this salt with `ucm store unpin`, or raise store: posix_capacity",
            )


def _opened(stack: ExitStack, config: StoreConfig, names: Sequence[str], namespace: str, *how: Any) -> list[Tier]:
    """Open tiers until the stack is closed."""
    return [stack.enter_context(closing(open_tier(config, name, namespace, *how))) for name in names]


def _absent(tier: Tier, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return the blocks that a tier does not have, in order.

    Raises:
        StoreError: It does not answer.
    """
    there = tier.contains(keys, tier.clock.monotonic() + tier.timeout)
    return [key for key, has in zip(keys, there, strict=True) if not has]


def _lacking(tier: Tier, keys: Sequence[BlockKey], failed: dict[str, str]) -> list[BlockKey] | None:
    """Return the same; None, and why, if the tier does not answer."""
    try:
        return _absent(tier, keys)
    except StoreError as error:
        failed.setdefault(tier.name, error.what)
        return None


def _nbytes(tiers: Sequence[Tier], keys: Sequence[BlockKey], failed: dict[str, str]) -> int:
    """Return the size of the first of these blocks that a tier returns, as they are alike; 0, and why, if none does."""
    for key in keys:
        for tier in tiers:
            try:
                return tier.read_file(key, tier.clock.monotonic() + tier.transfer_timeout).nbytes
            except BlockMissingError:
                pass
            except StoreError as error:
                failed.setdefault(tier.name, error.what)
    return 0


def _copy(top: Tier, others: Sequence[Tier], key: BlockKey) -> dict[str, str]:
    """Copy a block from the first other tier that returns it; if none does, return why, by the tiers' names."""
    failed = {}
    for tier in others:
        source = tier
        try:
            content = tier.read_file(key, tier.clock.monotonic() + tier.transfer_timeout)
            source = top
            top.put(key, [content], top.clock.monotonic() + top.transfer_timeout)
        except StoreError as error:
            failed[source.name] = error.what
        else:
            return {}
    return failed


def _lacks(data: dict[str, Any]) -> bool:
    """Return whether the first tier lacks blocks of the prompt."""
    return bool(data["there"] < data["blocks"])


def run(options: argparse.Namespace) -> int:
    """Do what the command says, and print it; 1 if a tier does not answer, or not all was done that was asked.

    Raises:
        UcmError: The settings, the model, the prompt or the salt cannot be used.
    """
    quieten()
    salt = read_secret(options.salt_file, None, "--salt-file")
    token_ids = read_prompt(options)
    described = describe(options.config, options.model, options.engine_args)
    act, tell = ACTIONS[options.action]
    given = {name: value for name, value in vars(options).items() if name in {"seconds", "from_token"}}
    data = act(Prompt(*described, token_ids, salt), **given)
    lines, is_whole = tell(data, options.action)
    answer(options, data, lines)
    return int(not is_whole)


def _found(data: dict[str, Any], _: str) -> tuple[list[str], bool]:
    loaded, groups = data["found_tokens"], data["groups"]
    lines = [f"An engine with an empty KV cache would load {loaded:,} of {many(data['tokens'], 'token', 'tokens')}."]
    for one in groups:
        blocks, size, units = one["blocks"], one["block_tokens"], one["units"]
        lines += ["", f"{one['namespace']}: {many(len(blocks), units.removesuffix('s'), units)} of {size} tokens"]
        rows = [(units, "tokens", "stored in", "first key")]
        at = 0
        for tiers, run_of in groupby(block["tiers"] for block in blocks):
            end = at + len(list(run_of))
            where = ", ".join(tiers) or "-"
            rows.append((f"{at}-{end - 1}", f"{at * size}-{end * size - 1}", where, blocks[at]["key"]))
            at = end
        if at:
            lines += [f"  {line}" for line in table(rows)]
        lines += [f"  {name} does not answer: {causes}" for name, causes in one["silent"].items()]
    return lines, not any(one["silent"] for one in groups)


def _leased(data: dict[str, Any], action: str) -> tuple[list[str], bool]:
    tiers, done = data["tiers"], "ended" if action == "unpin" else "leased"
    what = {"pin": "pinned until", "retain": "retained until", "unpin": "no longer leased"}[action]
    what, lines = f"{what} {data.get('until', '')}".rstrip(), []
    for name, one in tiers.items():
        rest = "; the others are only retained" if action == "pin" and one[done] < one["blocks"] else ""
        lines.append(f"{name}: {one[done]:,} of {many(one['blocks'], 'stored block', 'stored blocks')} {what}{rest}")
    lines += [
        f"{name}: {many(len(one['refused']), 'block', 'blocks')} cannot be leased by this user: {one['refused'][0]}"
        for name, one in tiers.items()
        if one["refused"]
    ]
    lines += [f"{name}: no leases: what it evicts is decided elsewhere" for name in data["without"]]
    # E.g. memory has no pins, but the disk has.
    is_whole = all(one[done] in (0, one["blocks"]) for one in tiers.values())
    return lines, is_whole and any(one[done] for one in tiers.values())


def _copied(data: dict[str, Any], _: str) -> tuple[list[str], bool]:
    tier, lacks = data["tier"], _lacks(data)
    of_all = many(data["blocks"], "block", "blocks")
    lines = [f"{tier}: {data['there']:,} of {of_all}, {data['copied']:,} of them copied"]
    lines += [] if lacks else [f"An engine loads {many(data['tokens'], 'token', 'tokens')} from there."]
    return lines + _reasons(data), not lacks and not data["failed"]


def _demoted(data: dict[str, Any], _: str) -> tuple[list[str], bool]:
    tier, lower = data["tier"], " or ".join(data["lower"])
    lines = [f"{tier}: {many(data['deleted'], 'block', 'blocks')} deleted, which {lower} has"]
    lines += [f"{tier}: {many(data['kept'], 'block', 'blocks')} kept, which no other tier has"] if data["kept"] else []
    return lines + _reasons(data), not data["failed"]


def _dropped(data: dict[str, Any], _: str) -> tuple[list[str], bool]:
    deleted = {name: count for name, count in data["dropped"].items() if name not in data["failed"]}
    lines = [f"{name}: {many(count, 'block', 'blocks')} deleted" for name, count in deleted.items()]
    return lines + _reasons(data), not data["failed"]


def _reasons(data: dict[str, Any]) -> list[str]:
    return [f"{name}: {reason}" for name, reason in data["failed"].items()]


#: Each action, and its text with whether all was done, from what it returned and its name.
ACTIONS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any], str], tuple[list[str], bool]]]] = {
    "lookup": (Prompt.lookup, _found),
    "retain": (Prompt.retain, _leased),
    "pin": (Prompt.pin, _leased),
    "unpin": (Prompt.unpin, _leased),
    "prefetch": (Prompt.prefetch, _copied),
    "demote": (Prompt.demote, _demoted),
    "drop": (Prompt.drop, _dropped),
}
