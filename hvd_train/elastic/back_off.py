"""How long to wait before something that has failed is tried again: ever longer, up to a bound. Pure."""

from __future__ import annotations


def wait_s(first_s: float, longest_s: float, times_before: int) -> float:
    """Return the seconds to wait: `first_s`, doubled for each time before this one, at most `longest_s`."""
    doublings = min(times_before, 100)  # 2.0 to the 1024th, after a day of attempts, would be an error
    return min(first_s * 2.0**doublings, longest_s)
