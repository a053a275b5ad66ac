"""Essential sparse attention: `ucm.sparse.esa.method` is the method, the other modules are its parts."""
