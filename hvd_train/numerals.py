"""Read whole numbers that users type and that launchers and files hold."""

import re


def whole_number(text: str) -> int | None:
    """Return the number of one to eighteen digits 0 to 9; None for any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None  # str.isdigit is true for ², which int refuses
