"""How fast it is: the step, sums over ranks, the input, and numbers of workers.

`stepper` repeats what is measured on all ranks, `record` writes tables and JSON files. `throughput`, `allreduce`,
`pipeline` and `scaling` are the tools of `hvd-train bench`; start with `throughput`.
"""
