"""Chosen steps as all ranks and Horovod saw them, in one trace for Perfetto, with a summary of where the time went.

A `Profile` tells a `Recording` on each rank when to begin and to end; rank 0 gathers what they recorded and writes it.
Start with `profile`; `clock_offsets` says how the clocks of several hosts become one.
"""
