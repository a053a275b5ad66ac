"""Scripts that run in an environment with vLLM; each stands alone, so that `ucm` comes from the installed wheel."""
