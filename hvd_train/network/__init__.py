"""The model and what acts on it: weights to start from, frozen layers, optimizers, batch norm over ranks, the device.

Settings and a place go in; a model, an optimizer and a device come out. Start with `models`; `normalization` keeps
running statistics independent of the number of ranks.
"""
