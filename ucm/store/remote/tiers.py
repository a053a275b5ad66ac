"""Store blocks as values on servers, Redis, Mooncake or S3: the tiers differ in their options and their client only."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from ucm.errors import ConfigError, install_extra
from ucm.store.base import (
    BlockCorruptError,
    BlockForeignError,
    BlockKey,
    BlockMissingError,
    StoreError,
)
from ucm.store.config import read_secret
from ucm.store.format import (
    AUTHENTICATED_VERSION,
    VERSION,
    known_codec,
    namespace_digest,
    nbytes_of,
    verify,
)
from ucm.store.tier import CompressingOptions, TierOptions, ValueTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from ucm.store.base import BlockTransfer, Buffer
    from ucm.store.health import Breaker
    from ucm.store.tier import Outcome, TierPlace

_MOST_PORT = 65535
#: The most seconds until a value expires, a hundred years; Redis refuses what overflows its clock.
_MOST_TTL = 100 * 366 * 86400
#: The most seconds of a time limit, a day.
_MOST_SECONDS = 86400.0


class RemoteOptions(CompressingOptions):
    """The options that all tiers on servers have."""

    #: What the names of two options call the secret: that of its file and that of its variable.
    word: ClassVar[str] = "secret"
    timeout: float = Field(default=0.5, gt=0, le=_MOST_SECONDS)
    transfer_timeout: float = Field(default=5.0, gt=0, le=_MOST_SECONDS)

    @field_validator("*", mode="before")
    @classmethod
    def _is_not_empty(cls, value: object, info: ValidationInfo) -> object:
        if value == "" and cls.model_fields[str(info.field_name)].default != "":
            raise ValueError("it is empty: write a text, or leave the option out")
        return value

    @model_validator(mode="after")
    def _has_one_secret(self) -> Self:
        if None not in self.secret_at:
            raise ValueError(f"the {self.word} is in {self.word}_file or in {self.word}_env, not in both")
        return self

    @property
    def secret_at(self) -> tuple[str | None, str | None]:
        """The file, or the environment variable, that contains the secret."""
        return getattr(self, f"{self.word}_file", None), getattr(self, f"{self.word}_env", None)

    @property
    def files(self) -> list[str]:
        """Further files that must be readable: those of TLS."""
        found = (getattr(self, name, None) for name in ("tls_ca", "tls_certificate", "tls_key"))
        return [name for name in found if name is not None]


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A block on a server.

    Args:
        digest: The hexadecimal digest of its namespace.
        key: Its key.
        nbytes: The length of its value.
    """

    digest: str
    key: BlockKey
    nbytes: int


class Client(ABC):
    """Talks to the servers of some options; shared by all stores of a process. Any thread may call it.

    A call returns by its deadline, as the ``monotonic()`` of the clock that the client was made with. Where it returns
    one answer for each name, an answer can be a StoreError; other calls raise it.

    Sockets, event loops and native code know no clock but the system's. In a simulation, a call that waits in one of
    them keeps the turn of its thread; to time out in simulated time, the client gets what it talks through as a
    parameter: the class of the connections, the event loop and the requests, or Mooncake's connected client.
    """

    #: What separates the parts of a name.
    separator: ClassVar[str] = ":"
    #: The breaker of the servers; None if each of them has one of its own.
    breaker: Breaker | None = None
    #: How many stores of this process share it.
    users: int = 0

    @property
    def resting(self) -> float:
        """The share of the servers that rest, 0 to 1; only asked where each has a breaker of its own."""
        return 0.0

    @abstractmethod
    def exists(self, names: Sequence[str], deadline: float) -> list[bool | StoreError]:
        """Return whether each value exists."""

    @abstractmethod
    def read(
        self, names: Sequence[str], memory: Sequence[Sequence[Buffer]], nbytes: int, deadline: float
    ) -> list[StoreError | None]:
        """Receive each value, whose length should be ``nbytes``, into memory of as many.

        Returns:
            For each value None, or why the memory is undefined: an OtherFormError for a value of another length.
        """

    @abstractmethod
    def fetch(self, names: Sequence[str], nbytes: int | None, deadline: float) -> list[Buffer | StoreError]:
        """Return each value of at most ``nbytes``, a longer one is corrupt; None: however long it is."""

    @abstractmethod
    def put(self, name: str, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a value, given in pieces, atomically."""

    @abstractmethod
    def remove(self, name: str, deadline: float) -> None:
        """Delete a value, if it exists."""

    @abstractmethod
    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the names that begin with a prefix, each with the length of its value."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


class RemoteTier(ValueTier):
    """A tier that stores each block as one value on servers.

    A value is the header and the layer slices of a block, stored by one request and checked when it is received. Its
    name is ``ucm<format version>``, the digest of the namespace and the block's key, so that releases with other
    formats do not share values.

    Args:
        options: The options of the servers.
        place: The namespace and geometry to open.
        client: The client, which has the place's clock and which its maker closes; None: the one of these options,
            which all stores of this process share.

    Raises:
        ConfigError: The client's package is not installed, or a file with a secret or a certificate cannot be read.
    """

    #: The tier's name in statistics, which is also that of its extra; the package that the extra installs; the module
    #: of the client, imported only where the tier is configured; the longest value that servers accept, in bytes; and
    #: whether their values can be listed.
    kind: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]
    most_nbytes: ClassVar[int]
    lists: ClassVar[bool] = True

    def __init__(self, options: RemoteOptions, place: TierPlace, client: Client | None = None) -> None:
        options.require_packages(place.name)
        self._compresses = options.compression != "none"
        self._client = client if client is not None else _share(type(self), options, place)
        self._shares = client is None
        super().__init__(self.kind, place, options.timeout, options.transfer_timeout, self._client.breaker)
        # Tools without the key count and delete authenticated blocks as well.
        version = VERSION if place.config.authentication_key_file is None else AUTHENTICATED_VERSION
        self._format = f"ucm{version}{self._client.separator}"
        self._prefix = f"{self._format}{namespace_digest(place.namespace).hex()}{self._client.separator}"

    @property
    def resting(self) -> float:
        """The share of the servers that rest, 0 to 1."""
        return self._client.resting

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Look up keys on the servers."""
        answers = self._client.exists(list(map(self._name, keys)), deadline)
        failures = [answer for answer in answers if isinstance(answer, StoreError)]
        if failures:
            if len(failures) == len(answers):
                raise failures[0]
            self.counters.failed("lookup", failures[0])  # some servers answer, so do not raise
        return [answer is True for answer in answers]

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Load the blocks' values, each directly into its memory, unless it is compressed or a part of it is wanted."""
        whole = known_codec(self.codec).geometry.nbytes
        if self._compresses or any(block.nbytes < whole for block in blocks):
            return super().read_many(blocks, deadline)
        refusals = self._receive(blocks, deadline)  # but another engine may compress
        others = [block for block, one in zip(blocks, refusals, strict=True) if isinstance(one, OtherFormError)]
        found = iter(super().read_many(others, deadline) if others else ())
        return [
            next(found) if isinstance(one, OtherFormError) else self.outcome(block.key, one, deadline)
            for block, one in zip(blocks, refusals, strict=True)
        ]

    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        """Return the value, whatever its length."""
        (found,) = self.fetch_many([key], deadline)
        if isinstance(found, StoreError):
            raise found
        return found

    def fetch_many(self, keys: Sequence[BlockKey], deadline: float) -> list[Buffer | StoreError]:
        """Return values by one call of the client."""
        most = self.codec.file_nbytes if self.codec else None
        return self._client.fetch(list(map(self._name, keys)), most, deadline)

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a whole block as one value, by one request, compressed if that is configured."""
        stored = known_codec(self.codec).pack(pieces) if self._compresses else pieces
        self._client.put(self._name(key), stored, deadline)
        if self._compresses:
            self.counters.compressed(nbytes_of(stored))

    def remove(self, key: BlockKey, deadline: float) -> None:
        """Delete the value by one request."""
        self._client.remove(self._name(key), deadline)

    def stored(self) -> Iterator[StoredValue]:
        """Yield the blocks of all namespaces in our format; for tools.

        Raises:
            StoreError: The servers cannot be asked.
        """
        for name, nbytes in self._client.names(self._format):
            digest, _, key = name.removeprefix(self._format).partition(self._client.separator)
            try:
                yield StoredValue(digest, BlockKey(bytes.fromhex(key)), nbytes)
            except ValueError:
                continue  # not a block of ours

    def check(self, value: StoredValue, authentic: Callable[[], object] = int) -> StoreError | None:
        """Read a block of any namespace and compare every checksum; return what is wrong with it, or None.

        Args:
            value: The block.
            authentic: Called if it is authenticated by the tier's key, and its tags are right.
        """
        if value.nbytes > self.most_nbytes:
            return BlockCorruptError(f"the value has {value.nbytes} bytes, more than any block", where=self.path(value))
        try:
            until = self.clock.monotonic() + self.transfer_timeout
            (content,) = self._client.fetch([self.path(value)], value.nbytes, until)
            if isinstance(content, StoreError):
                return content
            header, _ = verify(content, value.key, self.authenticator, any_key=True)
            if header.namespace_digest.hex() != value.digest:
                return BlockForeignError("the block belongs to another namespace")
            if header.tags:
                authentic()
        except StoreError as error:
            return error
        return None

    def discard(self, value: StoredValue) -> None:
        """Delete a block of any namespace.

        Raises:
            StoreError: The block could not be deleted.
        """
        self._client.remove(self.path(value), self.clock.monotonic() + self.timeout)

    def path(self, value: StoredValue) -> str:
        """Return the name of a block on the servers."""
        return f"{self._format}{value.digest}{self._client.separator}{value.key.hex()}"

    def close(self) -> None:
        """Close the connections, unless another store of this process uses them."""
        if self._shares:
            self._shares = False
            _let_go(self._client)

    def _name(self, key: BlockKey) -> str:
        return self._prefix + key.hex()

    def _receive(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[StoreError | None]:
        """Receive blocks that are not compressed; return what is wrong with each."""
        codec = known_codec(self.codec)
        headers = [bytearray(codec.nbytes) for _ in blocks]
        memory = [[memoryview(header), *block.slices] for header, block in zip(headers, blocks, strict=True)]
        refusals = self._client.read([self._name(block.key) for block in blocks], memory, codec.file_nbytes, deadline)
        return [
            refusal
            or (None if codec.is_sound(header, block.key, 0, block.slices) else codec.refusal(header, block.key))
            for refusal, block, header in zip(refusals, blocks, headers, strict=True)
        ]


class OtherFormError(BlockCorruptError):
    """A value is damaged, or a compressed block."""


def misfit(nbytes: int, wanted: int) -> OtherFormError | None:
    """Return what is wrong with a value if it has another length than is wanted."""
    return None if nbytes == wanted else OtherFormError(f"the value has {nbytes} bytes, not {wanted}")


def too_long(nbytes: int, most: float) -> BlockCorruptError:
    """Return the error for a value that is longer than what was to be fetched."""
    return BlockCorruptError(f"the value has {nbytes} bytes, more than {most}")


def missing(name: str) -> BlockMissingError:
    """Return the error for a value that does not exist."""
    return BlockMissingError(f"the value {name} does not exist")


_shared: dict[tuple[Any, ...], Client] = {}
_lock = threading.Lock()


def _share(tier: type[RemoteTier], options: RemoteOptions, place: TierPlace) -> Client:
    """Return the client of some servers, with its breakers, shared by all stores of this process."""
    where = f"store: tiers: {place.name}"
    if place.codec is not None and place.codec.file_nbytes > tier.most_nbytes:
        raise ConfigError(
            f"a block has {place.codec.file_nbytes} bytes, and a server takes {tier.most_nbytes}",
            where=f"store: pipeline: {place.name}",
            fix="lower vLLM's block size",
        )
    try:
        client = import_module(tier.module).CLIENT
    except ImportError as error:
        raise ConfigError(
            f"the tier {place.name} needs {tier.package}: {error}",
            where="store: pipeline",
            fix=f"install it: {install_extra(tier.kind)}",
        ) from error
    for path in options.files:
        if not os.access(path, os.R_OK):
            raise ConfigError("a file of the TLS options cannot be read", where=f"{where}: {path}")
    secret = read_secret(*options.secret_at, where)
    limits = place.config.failures_until_rest, place.config.rest_seconds
    of = tier, os.getpid(), options.model_dump_json(), secret, *limits, place.clock
    made: Client | None = None
    while True:
        with _lock:
            if made is not None:
                _shared.setdefault(of, made)
            if (found := _shared.get(of)) is not None:
                found.users += 1
                break
        # Without the lock, because it starts threads and reads files, which may never answer.
        made = client(options, secret, *limits, clock=place.clock)
    if made is not None and made is not found:  # another thread was faster
        made.close()
    return found


def _let_go(client: Client) -> None:
    with _lock:
        client.users -= 1
        if client.users:
            return
        del _shared[next(of for of, one in _shared.items() if one is client)]
    client.close()


def _addresses(value: object) -> object:
    """Turn a single address or a list into a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _check_address(value: str) -> None:
    host, _, port = value.rpartition(":")
    if "@" in value or "/" in value or not host or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
        raise ValueError("an address is host:port; a user, a password or TLS are options of their own")


class RedisOptions(RemoteOptions):
    """The options of the Redis tier; docs/store.md explains them."""

    word = "password"
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
    ttl_seconds: int | None = Field(default=None, ge=1, le=_MOST_TTL)

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            _check_address(one)
        if not value:
            raise ValueError("there is no address")
        return value

    @model_validator(mode="after")
    def _what_goes_together(self) -> RedisOptions:
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


class RedisTier(RemoteTier):
    """A tier on Redis or Valkey servers; see ``RemoteTier``."""

    Options: ClassVar[type[TierOptions]] = RedisOptions
    rests_by_itself = True
    batch_nbytes = 4 << 20  # a server keeps its answers in new memory until they are received
    kind = "redis"
    package = "redis-py 8"
    module = "ucm.store.remote.redis_client"
    most_nbytes = 512 << 20


class MooncakeOptions(RemoteOptions):
    """The options of the Mooncake tier; docs/store.md explains them."""

    address: str = "127.0.0.1:50051"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    replicas: int = Field(default=1, ge=1)
    parallel: int = Field(default=4, ge=1, le=64)

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        _check_address(value)
        return value


class MooncakeTier(RemoteTier):
    """A tier in the memory that hosts lend to a Mooncake Store; see ``RemoteTier``."""

    Options: ClassVar[type[TierOptions]] = MooncakeOptions
    kind = "mooncake"
    package = "the client of Mooncake"
    lists = False
    module = "ucm.store.remote.mooncake_client"
    most_nbytes = 512 << 20


class S3Options(RemoteOptions):
    """The options of the S3 tier; docs/store.md explains them."""

    bucket: str = Field(min_length=3, max_length=63, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    virtual_hosted: bool = False
    access_key: str | None = None
    secret_file: str | None = None
    secret_env: str | None = None
    anonymous: bool = False
    tls_ca: str | None = None
    timeout: float = Field(default=2.0, gt=0, le=_MOST_SECONDS)
    transfer_timeout: float = Field(default=20.0, gt=0, le=_MOST_SECONDS)
    parallel: int = Field(default=32, ge=1, le=1024)

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith(("http://", "https://")) or "@" in value):
            raise ValueError("an endpoint is https://host:port or http://host:port; a user is an option of its own")
        return value

    @model_validator(mode="after")
    def _what_goes_together(self) -> S3Options:
        if (self.access_key is not None) != any(one is not None for one in self.secret_at):
            raise ValueError("access_key needs secret_file or secret_env, and these need access_key")
        if self.anonymous and self.access_key is not None:
            raise ValueError("anonymous requests have no access_key")
        return self


class S3Tier(RemoteTier):
    """A tier in a bucket; see ``RemoteTier``."""

    Options: ClassVar[type[TierOptions]] = S3Options
    kind = "s3"
    package = "obstore"
    module = "ucm.store.remote.s3_client"
    most_nbytes = 5 << 30
    first_wave = 8
