"""Tests of the runtime, without vLLM."""
