"""How fast it is: the step, sums over ranks, the input, numbers of workers, and Horovod's fastest settings.

Each tool measures and gives a record (`record`) that says on what and how. Start with `throughput`.
"""
