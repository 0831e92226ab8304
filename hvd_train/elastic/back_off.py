"""The growing wait between attempts. Pure."""


def wait_s(first_s: float, longest_s: float, times_before: int) -> float:
    """Return the seconds to wait: `first_s`, doubled for each earlier attempt, at most `longest_s`."""
    doublings = min(times_before, 100)  # 2.0 ** 1024 would raise OverflowError
    return min(first_s * 2.0**doublings, longest_s)
