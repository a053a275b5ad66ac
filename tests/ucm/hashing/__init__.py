"""Tests of the keys of KV blocks: what they depend on, and what not."""
