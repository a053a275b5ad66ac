"""UCM (Unified Cache Management): the runtime that an overlay of vLLM calls.

This package imports nothing else, because every process of a vLLM with an overlay imports it.
"""

__version__ = "0.1.0"
