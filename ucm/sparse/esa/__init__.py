"""Essential sparse attention: `ucm.sparse.esa.method` is the method, the rest is what it is made of."""
