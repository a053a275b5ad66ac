"""Tests of where UCM meets inference engines."""
