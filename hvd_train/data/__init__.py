"""Images and labels: where they come from, what is done to them, and how they arrive as batches on the device.

The settings of the data and the assignments of a rank go in, batches come out. Start with `sources`, then `loader`.
"""
