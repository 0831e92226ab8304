"""What is trained: a loss for each sample, and what is measured beside it. Start with `task`; `classification` is one.

Each built-in task is a short file to copy from. `meter` adds up what a task measures, over slots, steps and ranks.
"""
