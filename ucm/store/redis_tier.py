"""Store blocks on Redis or Valkey servers: a block is one value, which the server may evict at any time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ucm.errors import ConfigError
from ucm.store.errors import (
    BlockCorruptError,
    BlockMissingError,
    StoreError,
    StoreUnavailableError,
)
from ucm.store.format import VERSION, namespace_digest
from ucm.store.recent import RecentKeys
from ucm.store.secrets import read_secret
from ucm.store.tier import TierOptions, ValueTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer, TierStats
    from ucm.store.format import HeaderCodec
    from ucm.store.redis_wire import Command, Servers
    from ucm.store.tier import Outcome, TierPlace

_MOST_PORT = 65535
#: The largest value that a server accepts, in bytes.
_MOST_NBYTES = 512 << 20


def _addresses(value: object) -> object:
    """Turn a single address or a list into a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class RedisOptions(TierOptions):
    """The options of the Redis tier; docs/store.md explains them."""

    address: Annotated[tuple[str, ...], BeforeValidator(_addresses)] = ("127.0.0.1:6379",)
    mode: Literal["single", "sentinel", "cluster"] = "single"
    master: str | None = None
    database: int = Field(default=0, ge=0)
    username: str | None = None
    password_file: str | None = None
    password_env: str | None = None
    sentinel_auth: bool = False
    tls: bool = False
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_check_hostname: bool = True
    timeout: float = Field(default=0.5, gt=0)
    transfer_timeout: float = Field(default=5.0, gt=0)
    ttl_seconds: int | None = Field(default=None, ge=1)

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            host, _, port = one.rpartition(":")
            if "@" in one or "/" in one or not host or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
                raise ValueError("an address is host:port; a user, a password or TLS are options of their own")
        if not value:
            raise ValueError("there is no address")
        return value

    @model_validator(mode="after")
    def _what_goes_together(self) -> RedisOptions:
        if self.password_file is not None and self.password_env is not None:
            raise ValueError("the password is in password_file or in password_env, not in both")
        if (self.mode == "sentinel") != (self.master is not None):
            raise ValueError("the mode sentinel, and no other, needs master: the name that the sentinels know")
        if self.mode == "single" and len(self.address) > 1:
            raise ValueError("the mode single has one address")
        if self.mode == "cluster" and self.database:
            raise ValueError("a cluster has no database but 0")
        if not self.tls and (self.tls_ca or self.tls_certificate or self.tls_key):
            raise ValueError("tls_ca, tls_certificate and tls_key need tls: true")
        return self

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The servers' hosts and ports."""
        pairs = [one.rpartition(":") for one in self.address]
        return [(host.strip("[]"), int(port)) for host, _, port in pairs]


class RedisTier(ValueTier):
    """A tier that stores each block as one value.

    A value is the header and the layer slices of a block, stored by one command and checked when it is received. Its
    key is ``ucm<format version>:<digest of the namespace>:<block>``, so that releases with other formats do not share
    values.

    Args:
        options: The options of the servers.
        place: The namespace and geometry to open.

    Raises:
        ConfigError: redis-py is not installed, or a file with a secret or a certificate cannot be read.
    """

    Options: ClassVar[type[TierOptions]] = RedisOptions
    rests_by_itself = True

    def __init__(self, options: RedisOptions, place: TierPlace) -> None:
        super().__init__("redis", place, options.timeout, options.transfer_timeout)
        config = place.config
        if self.codec is not None and self.codec.file_nbytes > _MOST_NBYTES:
            raise ConfigError(
                f"a block has {self.codec.file_nbytes} bytes, and a server takes {_MOST_NBYTES}",
                where=f"store: pipeline: {place.name}",
                fix="lower vLLM's block size",
            )
        self._options = options
        self._prefix = f"ucm{VERSION}:{namespace_digest(place.namespace).hex()}:".encode()
        self._servers = _share(options, place.name, config.failures_until_rest, config.rest_seconds)
        self._recent = RecentKeys(config.lookup_cache_keys, config.lookup_cache_seconds)
        self._closed = False

    @property
    def resting(self) -> float:
        """The share of the servers that rest, 0 to 1."""
        nodes = self._servers.nodes
        return sum(node.rests for node in nodes) / len(nodes)

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Look up keys in one round trip to each server, except keys that were found recently."""
        young, old = self._recent.generations()
        unknown = [key for key in keys if key not in young and key not in old]
        if not unknown:
            return [True] * len(keys)
        failure: StoreError | None = None
        there = set()
        for key, found in zip(
            unknown, self._servers.exists([self._name(key) for key in unknown], deadline), strict=True
        ):
            if isinstance(found, StoreError):
                failure = failure or found
            elif found:
                there.add(key)
        young |= there
        if failure is not None:
            if not there and len(unknown) == len(keys):
                raise failure
            self.counters.failed("lookup", failure)  # the other servers answered, so do not raise
        lacking = set(unknown) - there
        return [key not in lacking for key in keys]

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Load the blocks' values in pipelined commands, each received directly into its memory."""
        codec = self._known_codec()
        headers = [bytearray(codec.nbytes) for _ in blocks]
        replies = self._servers.run(
            [self._name(block.key) for block in blocks],
            lambda index: self._gets(blocks[index], headers[index], deadline),
            deadline,
        )
        outcomes: list[Outcome] = []
        for block, header, reply in zip(blocks, headers, replies, strict=True):
            failure = self._judge(block, header, reply)
            if failure is None:
                outcomes.append(False)
                continue
            self._recent.drop(block.key)
            if not isinstance(failure, BlockMissingError | StoreUnavailableError):
                failure = self.damaged(block.key, failure, deadline)
            outcomes.append(failure)
        return outcomes

    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        """Return the value, whatever its length."""
        from ucm.store.redis_wire import Command, pack  # noqa: PLC0415 - see _share

        name = self._name(key)
        if self.codec is not None:
            from ucm.store.redis_wire import Into  # noqa: PLC0415 - see _share

            content = memoryview(bytearray(self.codec.file_nbytes))
            (reply,) = self._servers.run(
                [name], lambda _: [Command([pack(b"GET", name)], Into([content], deadline))], deadline
            )
        else:
            (reply,) = self._servers.run([name], lambda _: [Command([pack(b"GET", name)])], deadline)
        if isinstance(reply, StoreError):
            raise reply
        if reply[0] is None:
            self._recent.drop(key)
            raise BlockMissingError(f"block {key.hex()} is not in the store", where=self.name)
        if self.codec is None:
            return memoryview(reply[0])
        return content if reply[0] == content.nbytes else content[: min(reply[0], content.nbytes - 1)]

    def put_value(self, key: BlockKey, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store the value by one SET."""
        from ucm.store.redis_wire import Command, pack_set  # noqa: PLC0415 - see _share

        name = self._name(key)
        command = Command(pack_set(name, buffers, self._options.ttl_seconds))
        (reply,) = self._servers.run([name], lambda _: [command], deadline, writing=True)
        if isinstance(reply, StoreError):
            raise reply
        self._recent.generations()[0].add(key)

    def remove(self, key: BlockKey, deadline: float) -> None:
        """Delete the value by one DEL."""
        del deadline
        name = self._name(key)
        self._recent.drop(key)
        self._servers.plain(name, b"DEL", name)

    def stats(self) -> TierStats:
        """Return the counters; the memory use of the servers is unknown."""
        return self.counters.snapshot(None, None)

    def close(self) -> None:
        """Close the connections, unless another store of this process uses them."""
        if not self._closed:
            self._closed = True
            _let_go(self._servers)

    def _name(self, key: BlockKey) -> bytes:
        return self._prefix + key.hex().encode()

    def _gets(self, block: BlockTransfer, header: bytearray, deadline: float) -> Sequence[Command]:
        """Return the commands that load some layer slices of a block."""
        from ucm.store.redis_wire import Command, Into, pack  # noqa: PLC0415 - see _share

        codec, name, first = self._known_codec(), self._name(block.key), block.first_slice
        begin, end = codec.offsets[first], codec.offsets[first + len(block.slices)]
        if end - begin == codec.geometry.nbytes:
            return [Command([pack(b"GET", name)], Into([memoryview(header), *block.slices], deadline))]
        return [
            Command([pack(b"GETRANGE", name, b"0", b"%d" % (codec.nbytes - 1))], Into([memoryview(header)], deadline)),
            Command([pack(b"GETRANGE", name, b"%d" % begin, b"%d" % (end - 1))], Into(block.slices, deadline)),
        ]

    def _judge(self, block: BlockTransfer, header: bytearray, reply: Any) -> StoreError | None:
        """Return what is wrong with a received value, or None."""
        codec = self._known_codec()
        if isinstance(reply, StoreError):
            return reply
        if reply[0] is None or (len(reply) > 1 and reply[0] == 0):
            return BlockMissingError(f"block {block.key.hex()} is not in the store", where=self.name)
        whole = len(block.slices) == len(codec.geometry.slice_sizes)
        lengths = (
            [codec.file_nbytes] if whole else [codec.nbytes, sum(layer_slice.nbytes for layer_slice in block.slices)]
        )
        if reply != lengths:
            return BlockCorruptError(f"the value has {reply} bytes, not {lengths}")
        if codec.is_sound(header, block.key, block.first_slice, block.slices):
            return None
        return codec.refusal_of(header, block.key)

    def _known_codec(self) -> HeaderCodec:
        if self.codec is None:
            raise ValueError("the store was opened without a geometry: it looks up and prefetches, no more")
        return self.codec


_shared: dict[tuple[int, str, int, float], tuple[Servers, int]] = {}
_lock = threading.Lock()


def _share(options: RedisOptions, name: str, failures: int, rest: float) -> Servers:
    """Return the connections and breakers of some servers, shared by all stores of this process."""
    try:
        from ucm.store.redis_wire import Servers  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ConfigError(
            f"the tier {name} needs redis-py 8: {error}",
            where="store: pipeline",
            fix="install the extra: pip install 'ucm-runtime[redis]'",
        ) from error
    where = f"store: tiers: {name}"
    for path in (options.tls_ca, options.tls_certificate, options.tls_key):
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError("a file of the TLS options cannot be read", where=f"{where}: {path}")
    password = read_secret(options.password_file, options.password_env, where)
    of = os.getpid(), f"{options.model_dump_json()} {password}", failures, rest
    with _lock:
        servers, users = _shared.get(of, (None, 0))
        if servers is None:
            servers = Servers(options, password, failures, rest)
        _shared[of] = servers, users + 1
        return servers


def _let_go(servers: Servers) -> None:
    with _lock:
        of = next(one for one, (found, _) in _shared.items() if found is servers)
        users = _shared[of][1] - 1
        if users:
            _shared[of] = servers, users
            return
        del _shared[of]
    servers.close()
