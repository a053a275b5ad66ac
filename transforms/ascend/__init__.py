"""The rules that change vLLM Ascend, which copies or replaces vLLM's schedulers, runner and operators."""
