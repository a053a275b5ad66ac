"""An engine in miniature around the real scheduler side, worker side and stores.

It schedules as vLLM does, and its model is a function of every KV value that it reads: a block that is wrong in any
byte, or in the wrong place, changes all that is computed behind it. Nothing here needs hypothesis, torch or vLLM.
"""
