"""The commands of `hvd-train`. `tree` has their flags; each function returns an exit code."""
