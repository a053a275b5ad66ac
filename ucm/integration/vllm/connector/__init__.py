"""The parts of the prefix-cache connector: scheduler side, worker side, and the memory of KV blocks."""
