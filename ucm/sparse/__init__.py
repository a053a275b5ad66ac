"""Sparse attention: the interface of a method, and the methods."""
