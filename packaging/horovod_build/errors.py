"""The error of the builder."""


class BuildError(Exception):
    """An error that the user can fix; each argument is one line: what is wrong, why, and what to type."""
