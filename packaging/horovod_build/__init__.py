"""The parts of `build_horovod.py`. A module imports only from those before it.

errors, show        what goes wrong, and what the user sees
patches             read and apply them, with the new files that they add
machine, mpi, cuda  what is on this machine
cache, workshop     the folders that stay, and the one of a build
fetch               the release and the build's tools, through pip
plan                all that a build depends on, and its key
variables, wheel    the build
"""
