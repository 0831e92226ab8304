"""What the builder raises."""


class BuildError(Exception):
    """Something the user can act on: each argument is one line that says what, why and what to type."""
