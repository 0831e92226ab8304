"""How fast it is: the step, its batch, sums over ranks, the input, numbers of workers, and Horovod's fastest settings.

A config and a world go in; a record comes out, which says on what and how it was made (`record`), and a table for
people. Start with `throughput`; `batch`, `allreduce`, `pipeline` and `scaling` are the other tools of `hvd-train
bench`. `tune` starts jobs that `turn` times, to find the fastest settings of Horovod.
"""
