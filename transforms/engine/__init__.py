"""How a rule is applied to a module; knows nothing of vLLM."""
