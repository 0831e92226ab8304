"""The parts of `build_horovod.py`. A module imports only from those before it.

machine   what is on this machine, and the error for the user
patches   reads and applies the patches, and the new files of the release
cache     the folders that stay, and the one for temporary files
plan      everything that a build depends on, and its key
wheel     the build
"""
