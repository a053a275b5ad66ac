"""vLLM's own scheduler taken through steps, with workers in miniature behind it."""
