"""The parts of `environment.py`, all in syntax of Python 3.6. A module imports only from those before it.

show, machine       what the user sees, what this machine answers
checkout, disk      the folders and the lists of packages, room for them
headers, preflight  what is missing on the machine, and what to type
state               what an earlier set-up left
steps               the set-up
"""
