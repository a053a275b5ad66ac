"""vLLM's own scheduler run step by step, with miniature workers."""
