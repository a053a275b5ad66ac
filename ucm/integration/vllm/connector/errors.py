"""Errors that stop a connector at its start, and the one error that stops a running one."""

from __future__ import annotations

from ucm.errors import ConfigError, UcmError


class UnknownLayoutError(UcmError):
    """The layout of the registered KV caches is unknown, so blocks cannot be located reliably."""


class UnsupportedModelError(ConfigError):
    """The model's KV cannot be restored from blocks, or a setting of the engine forbids it."""


class PromisedBlockLostError(UcmError):
    """Promised blocks must not be used, because the weights were changed in place, and nothing can recompute them.

    Raised where vLLM has no load-failure recovery: the engine stops rather than continue with wrong KV.
    """
