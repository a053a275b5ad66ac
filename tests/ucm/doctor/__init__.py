"""Tests of `ucm doctor`."""
