"""How fast it is: the step, sums over ranks, the input, and numbers of workers.

`throughput`, `allreduce`, `pipeline`, `scaling` are the tools of `hvd-train bench`; `stepper` times, `record` writes.
"""
