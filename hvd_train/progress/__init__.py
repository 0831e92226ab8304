"""What follows from a run's progress: the samples that come next, the learning rate, sums of scores, timing.

A run's progress (epoch, cursor, step) goes in; what follows from it comes out, the same on any number of ranks. Nothing
here communicates with other ranks, builds a model or opens a file. Start with `order`.
"""
