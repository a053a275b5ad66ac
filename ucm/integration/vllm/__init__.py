"""Where UCM meets vLLM: the hooks that rewritten modules call, and what they need of vLLM's objects."""
