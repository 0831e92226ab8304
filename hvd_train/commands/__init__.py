"""One file for each command of `hvd-train`: its options, its lines of the overview, and what it does.

No module here imports torch before it has parsed its arguments. Start with `train`.
"""
