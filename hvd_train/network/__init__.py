"""Models, initial weights, frozen layers, optimizers, batch norm over ranks, and the device.

Start with `models`.
"""
