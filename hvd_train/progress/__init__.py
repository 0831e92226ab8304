"""Functions of a run's progress: sample order, learning rate, sums of scores, timing.

Start with `order`.
"""
