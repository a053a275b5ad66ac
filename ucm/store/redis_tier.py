"""Store blocks on Redis or Valkey servers: a block is one value, which the server may evict at any time."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ucm.store.remote_tier import RemoteOptions, RemoteTier
from ucm.store.tier import TierOptions  # noqa: TC001 - part of a public class

_MOST_PORT = 65535


def _addresses(value: object) -> object:
    """Turn a single address or a list into a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class RedisOptions(RemoteOptions):
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
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_check_hostname: bool = True
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
    def secret_at(self) -> tuple[str | None, str | None]:
        """Where the password is."""
        return self.password_file, self.password_env

    @property
    def files(self) -> tuple[str | None, ...]:
        """The files for TLS."""
        return self.tls_ca, self.tls_certificate, self.tls_key

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The servers' hosts and ports."""
        pairs = [one.rpartition(":") for one in self.address]
        return [(host.strip("[]"), int(port)) for host, _, port in pairs]


class RedisTier(RemoteTier):
    """A tier on Redis or Valkey servers; see ``RemoteTier``."""

    Options: ClassVar[type[TierOptions]] = RedisOptions
    rests_by_itself = True
    kind = "redis"
    package = "redis-py 8"
    module = "ucm.store.redis_wire"
    most_nbytes = 512 << 20
