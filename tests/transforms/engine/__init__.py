"""Tests of how rules are applied; nothing of vLLM's code occurs in them."""
