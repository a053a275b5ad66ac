"""What stops a connector at its start, and the one thing that stops a running one."""

from __future__ import annotations

from ucm.errors import ConfigError, UcmError


class UnknownLayoutError(UcmError):
    """The registered KV caches are laid out in a way that is not known; blocks would be guessed."""


class UnsupportedModelError(ConfigError):
    """The model has KV that cannot be restored from blocks, or the engine a setting under which it must not be."""


class PromisedBlockLostError(UcmError):
    """Blocks were promised that must not be used: the weights were changed in place since, and nothing can recompute.

    Raised where vLLM has no load-failure recovery: the engine stops rather than go on with wrong KV.
    """
