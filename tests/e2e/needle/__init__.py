"""The accuracy that sparse methods lose on retrieval from long contexts, with a small trained model.

`python -m tests.e2e.needle --methods … --budgets 0.25 0.1 0.05` trains the model once, asks real engines, prints a
table and draws a plot.
"""
