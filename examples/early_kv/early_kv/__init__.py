"""Workers fetch KV of other engines before a step updates their state; see `docs/move_your_patch.md`."""
