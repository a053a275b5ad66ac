"""Tests of `ucm.blend`."""
