"""Tests of the seam to vLLM, on the sources that vLLM published."""
