"""The prefix-cache connector in parts: what the scheduler decides, what a worker moves, where a block's bytes are."""
