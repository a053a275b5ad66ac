"""Retrieval from long contexts by a small model that can do it: what a sparse method loses, measured.

`python -m tests.e2e.needle --methods … --budgets 0.25 0.1 0.05` trains the model once, asks real engines, prints a
table and draws a plot.
"""
