"""Compute keys of KV blocks: two requests share a block only if everything that shapes its KV is the same."""
