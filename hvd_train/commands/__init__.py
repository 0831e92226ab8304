"""The commands of `hvd-train`: their flags are in `tree`; a function each returns the exit code."""
