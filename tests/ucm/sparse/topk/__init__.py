"""`BlockTopK`, its selectors and its probe."""
