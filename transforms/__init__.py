"""What we change in vLLM, release by release, and how it becomes an overlay."""
