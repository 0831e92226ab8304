"""What a stage finds: each check passes, fails, or cannot be made here; and the figures that it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not applicable"]
Seen = tuple[str, dict[str, Any]]
"""What a check has seen: a sentence, and figures by name."""


class Failed(Exception):
    """Something is not as it must be; the text says what was seen instead."""

    def __init__(self, what: str, **figures: Any) -> None:
        super().__init__(what)
        self.figures = figures


class NotApplicable(Exception):
    """A check cannot be made here; the text says why."""


@dataclass(frozen=True)
class Finding:
    """The end of a check."""

    name: str
    verdict: Verdict
    what: str
    """What was seen, or why nothing could be."""
    figures: dict[str, Any] = field(default_factory=dict)


def checked(name: str, check: Callable[[], Seen]) -> Finding:
    """Make a check and return how it ended."""
    try:
        what, figures = check()
    except NotApplicable as reason:
        return Finding(name, "not applicable", str(reason))
    except Failed as reason:
        return Finding(name, "failed", str(reason), reason.figures)
    except Exception as error:  # noqa: BLE001  # the time on a GPU is short: a fault of one check must not end the others
        return Finding(name, "failed", f"the check itself broke: {type(error).__name__}: {error}")
    return Finding(name, "passed", what, figures)


def verdict_of(verdicts: Iterable[str]) -> Verdict:
    """Return the verdict on a whole: failed where a part has failed, not applicable where no part was applicable."""
    found = set(verdicts)
    return "failed" if "failed" in found else "passed" if "passed" in found else "not applicable"
