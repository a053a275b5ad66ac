"""A miniature engine around the real scheduler side, worker side and stores.

It schedules like vLLM, and its model depends on every KV value that it reads: a block that is wrong in any
byte, or in the wrong place, changes everything computed after it. Nothing here needs hypothesis, torch or vLLM.
"""
