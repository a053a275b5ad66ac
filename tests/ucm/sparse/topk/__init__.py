"""`BlockTopK`, its summaries of blocks and its probe."""
