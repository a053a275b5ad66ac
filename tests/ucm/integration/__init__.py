"""Tests of UCM's integration into inference engines."""
