"""The model and what acts on it: weights to start from, frozen layers, optimizers, batch norm over ranks, the device.

Start with `models`; `normalization` holds how running statistics stay independent of the number of ranks.
"""
