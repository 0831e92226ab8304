"""The parts of `build_horovod.py`. A module imports only from those before it.

errors, show        the error for the user, and what the user sees
patches             reads and applies the patches, with the new files that they add
machine, mpi, cuda  what is on this machine
cache, workshop     the folders that stay, and the temporary folder of a build
fetch               the release, through pip
plan                everything that a build depends on, and its key
variables, wheel    the build
"""
