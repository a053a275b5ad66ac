"""Selectors of blocks, judged: what small models answer that read no more than a selector leaves them.

`python -m tests.e2e.judges` trains the models once, lets them answer offline with each selector, block size and budget,
and prints tables with the same rows everywhere: *oracle*, *mean*, *random* and the selectors of the methods.
"""
