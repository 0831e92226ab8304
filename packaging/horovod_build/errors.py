"""The error of the builder."""


class BuildError(Exception):
    """An error that the user can mend; each argument is one line that says what is wrong, why, and what to type."""
