"""Find chunks, pieces of text whose KV is reused anywhere in a prompt, and plan which of their tokens to recompute.

docs/blend.md describes what this does, costs and loses. The package does not import vLLM.
"""
