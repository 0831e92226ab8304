"""What `hvd-train bench` measures: a whole step, a reduction, the input alone, and how a training scales."""
