"""How fast it is: the step, and numbers of workers. `record` writes the results."""
