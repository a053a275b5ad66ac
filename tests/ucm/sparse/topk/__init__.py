"""vLLM's scheduler with ESA, over a transformer in miniature."""
