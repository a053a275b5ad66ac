"""Scripts that run in an environment with vLLM; each is self-contained, so that `ucm` is the installed wheel's."""
