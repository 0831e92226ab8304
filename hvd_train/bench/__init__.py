"""How fast it is: the step, sums over ranks, the input, and numbers of workers. `record` writes the results."""
