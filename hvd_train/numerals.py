"""Whole numbers as people type them and as launchers and files hold them: the one place that reads digits."""

from __future__ import annotations

import re


def whole_number(text: str) -> int | None:
    """Return the number that the digits 0 to 9 write, at most eighteen of them; None for any other text.

    `str.isdigit` is no check before `int`: it holds for `²`, which `int` refuses.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
