"""Tests of ``ucm store``."""
