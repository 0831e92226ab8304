"""A GPU for tests: CUDA and NCCL on the memory of the host.

README.md says what it can show and what it cannot.
"""
