"""Evaluation of block selectors: the answers of small models that read only the selected blocks.

`python -m tests.e2e.judges` trains the models once, lets them answer offline with each selector, block size and budget,
and prints tables with the same rows everywhere: *oracle*, *mean*, *random* and the selectors of the methods.
"""
