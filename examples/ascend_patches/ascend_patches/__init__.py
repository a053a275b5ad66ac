"""Three of vLLM Ascend's patches of vLLM as transforms; `docs/ascend.md` compares the two ways."""
