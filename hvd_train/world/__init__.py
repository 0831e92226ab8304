"""With whom a rank trains: `Place` and `World`, the world of one, and the only importer of Horovod.

Tensors and plain values go in, sums, broadcasts and gathered lists come out; a fault leaves as `RankLost`.
Start with `world`, then `horovod_world`.
"""
