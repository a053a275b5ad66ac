"""Keep blocks of KV cache outside the accelerator and find them again."""
