"""With whom a rank trains: `Place` and `World`, the world of one, and the only importer of Horovod.

Tensors and plain values go in, sums, broadcasts and gathered lists come out; a fault leaves as `RankLost`.
Start with `world`, the protocol. `horovod_world` is Horovod's, with `grouped_optimizer` for gradients, `wire` for what
is sent and `mpi` for the roll call under MPI. `elastic_world` adds ranks that come and go, with `heartbeat`.
"""
