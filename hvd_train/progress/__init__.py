"""Which samples come next, the learning rate, sums of what was learned, timing, a wish to stop.

A run's progress (epoch, cursor, step) goes in; what follows from it comes out, on any number of ranks. Nothing here
knows of ranks' communication, models or files. Start with `order`.
"""
