"""Sparse attention by the best blocks: `ucm.sparse.topk.method`."""
