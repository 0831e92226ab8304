"""The parts of `environment.py`, all in the syntax of Python 3.6. A module imports only from those before it.

show, machine       what the user sees, and answers of this machine
checkout, disk      folders and lists of packages, and the disk space that they need
headers, preflight  what is missing on the machine, and what to type
state               what an earlier set-up has left
steps               the steps of the set-up; start reading here
"""
