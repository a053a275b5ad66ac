"""The rules that change vLLM, and the pipeline that makes overlays from them."""
