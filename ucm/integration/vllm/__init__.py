"""UCM's integration into vLLM: the hooks that rewritten modules call, and the access to vLLM's objects."""
