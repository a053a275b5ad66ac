"""Tests of the rule engine; they contain no code of vLLM."""
