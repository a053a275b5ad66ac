"""Tests of the parts of the KV connectors."""
