"""One file for each command of `hvd-train`: its options, its lines of the overview, and what it does.

The arguments after the command's name go in, an exit code comes out. No module here imports torch before it has
parsed its arguments. Start with `train`.
"""
