"""The KV store: blocks of KV cache kept outside the accelerator, and found again."""
