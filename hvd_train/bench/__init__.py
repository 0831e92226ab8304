"""How fast it is: the step, the input, and numbers of workers. `record` writes the results."""
