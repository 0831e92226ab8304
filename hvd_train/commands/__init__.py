"""The commands of `hvd-train`: a function for each, which takes the arguments and returns the exit code."""
