"""Images and labels: their sources, their transforms, and their way to the device as batches.

The settings of the data and the assignments of a rank go in; batches come out. Start with `dataset`
(the values) and `sources` (data sets by name), then follow a batch in `loader`.
"""
