"""Content that an attacker may put into a file."""

import os
from collections.abc import Callable
from typing import Any


class Malicious:
    """Makes the folder `owned` if it is unpickled without care."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("owned",)
