"""The compiler that Triton wants to see in a back end."""

from __future__ import annotations

from triton.backends.compiler import BaseBackend

Compiler = type("Compiler", (BaseBackend,), dict.fromkeys(BaseBackend.__abstractmethods__))
