"""A task: what is measured for the samples of a micro-batch, and summed
over micro-batches and ranks.
"""
