"""Tests of the integration into vLLM, against vLLM's published sources."""
