"""How fast it is: the step, sums over ranks, the input, and numbers of workers.

A config and a world go in; a record comes out, which says on what and how it was made (`record`), and a table for
people. Start with `throughput`; `allreduce`, `pipeline` and `scaling` are the other tools of `hvd-train bench`.
"""
