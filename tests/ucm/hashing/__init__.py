"""Names of KV blocks: what they depend on, and what they do not."""
