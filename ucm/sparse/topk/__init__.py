"""Sparse attention by the best blocks: `ucm.sparse.topk.method`, and the probe that measures its budgets."""
