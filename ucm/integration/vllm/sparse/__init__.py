"""vLLM's attention as sparse methods see it: steps, layers, backends, and what cannot be served."""
