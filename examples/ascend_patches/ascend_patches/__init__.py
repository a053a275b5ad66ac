"""Patches of vLLM Ascend as transforms of vLLM; `docs/ascend_patches.md` lists them and compares the two ways."""
