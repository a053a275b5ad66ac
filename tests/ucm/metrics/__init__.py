"""Tests of the connectors' counters and their export, without vLLM."""
