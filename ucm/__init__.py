"""UCM (Unified Cache Management): the runtime that an overlay of vLLM calls.

Importing this package imports nothing else: it happens in every process of every vLLM that has the overlay installed.
"""

__version__ = "0.1.0"
