"""Measurements of our own promises; not part of the package, and never run as tests."""
