"""Tests of the transforms and their engine."""
