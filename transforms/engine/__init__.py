"""The rule engine: apply rules to modules. It does not depend on vLLM."""
