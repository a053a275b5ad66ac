"""The overlay's costs, measured side by side with plain vLLM: `python -m tests.e2e.bench [SECTION …]`."""
