"""Tests of what the connectors count, and of what becomes of it, without vLLM."""
