"""`BlockTopK`, and its summaries of blocks."""
