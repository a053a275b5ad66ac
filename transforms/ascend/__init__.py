"""The rules that change vLLM Ascend, which has copies of vLLM's schedulers, runner and operators, or its own."""
