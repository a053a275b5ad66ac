"""Store blocks in a bucket of S3 or a compatible server: a block is one object, which the bucket's rules may delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator, model_validator

from ucm.store.errors import StoreError
from ucm.store.remote_tier import RemoteOptions, RemoteTier
from ucm.store.tier import TierOptions  # noqa: TC001 - part of a public class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey

#: How many blocks of a prefix are looked up first; then twice as many, and so on, until one is missing.
_FIRST_WAVE = 8


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
    timeout: float = Field(default=2.0, gt=0)
    transfer_timeout: float = Field(default=20.0, gt=0)
    parallel: int = Field(default=32, ge=1, le=1024)

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith(("http://", "https://")) or "@" in value):
            raise ValueError("an endpoint is https://host:port or http://host:port; a user is an option of its own")
        return value

    @model_validator(mode="after")
    def _what_goes_together(self) -> S3Options:
        secrets = sum(one is not None for one in self.secret_at)
        if secrets > 1:
            raise ValueError("the secret is in secret_file or in secret_env, not in both")
        if (self.access_key is not None) != bool(secrets):
            raise ValueError("access_key needs secret_file or secret_env, and these need access_key")
        if self.anonymous and self.access_key is not None:
            raise ValueError("anonymous requests have no access_key")
        return self

    @property
    def secret_at(self) -> tuple[str | None, str | None]:
        """Where the secret access key is."""
        return self.secret_file, self.secret_env


class S3Tier(RemoteTier):
    """A tier in a bucket; see ``RemoteTier``."""

    Options: ClassVar[type[TierOptions]] = S3Options
    kind = "s3"
    package = "obstore"
    module = "ucm.store.s3_client"
    most_nbytes = 5 << 30

    def prefix(self, keys: Sequence[BlockKey], deadline: float) -> int:
        """Look up a prefix in growing parts, because each block costs a request."""
        hits, wave = 0, _FIRST_WAVE
        while hits < len(keys):
            part = keys[hits : hits + wave]
            try:
                found = super().prefix(part, deadline)
            except StoreError as error:
                if not hits:
                    raise
                self.counters.failed("lookup", error)  # the bucket answers, only not in time for all parts
                break
            hits += found
            if found < len(part):
                break
            wave *= 2
        return hits
