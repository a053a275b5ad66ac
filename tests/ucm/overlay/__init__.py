"""Tests of the overlay's import-time half, in real interpreters and virtual environments."""
