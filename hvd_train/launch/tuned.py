"""The file of NAME=VALUE lines in which `hvd-train tune` writes Horovod's settings for `train --tuned`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hvd_train.errors import UsageError, unknown_name
from hvd_train.numerals import whole_number

FUSION, CYCLE, CACHE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY"
LIMITS = {FUSION: (0.0, 2.0**31), CYCLE: (0.01, 1000.0), CACHE: (0.0, 2.0**20)}
"""The least and greatest value of each, in bytes, milliseconds and tensors. Only the cycle time may be a fraction."""
DEFAULTS = {FUSION: str(128 * 2**20), CYCLE: "1", CACHE: "1024"}


def read(path: Path) -> dict[str, str]:
    """Return the settings in a file. Raises UsageError where the file cannot be read or a line of it is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--tuned {path}: {error.strerror}; `hvd-train tune --output {path}` makes it") from None
    except UnicodeDecodeError:
        raise UsageError(f"--tuned {path} is not a text file") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = (part.strip() for part in line.partition("#")[0].partition("="))
        where = f"{path}, line {number}"
        if not (name or equals):
            continue
        if name not in LIMITS:
            raise UsageError(f"{where}: {unknown_name('setting', name, LIMITS)}")
        if name in found:
            raise UsageError(f"{where}: {name} stands there twice")
        if not _fits(name, value):
            low, high = LIMITS[name]
            kind = "number" if name == CYCLE else "whole number"
            raise UsageError(f"{where}: {name} is {value!r}; it must be a {kind} from {low:g} to {high:.0f}")
        found[name] = value
    return found


def _fits(name: str, value: str) -> bool:
    low, high = LIMITS[name]
    try:
        number = float(value)
    except ValueError:
        return False
    return low <= number <= high and (name == CYCLE or whole_number(value) is not None)


def apply(settings: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Add the settings to the environment, where Horovod reads them when the ranks meet.

    Raises UsageError where the environment has another value for one of them.
    """
    for name, value in settings.items():
        if environ.setdefault(name, value) != value:
            raise UsageError(f"--tuned says {name}={value}, but it is {environ[name]!r} already: unset {name}")


def text(settings: Mapping[str, str], comments: list[str]) -> str:
    """Return the text of a file with these settings, below these comments."""
    lines = [f"# {comment}" for comment in comments] + [f"{name}={value}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def describe(settings: Mapping[str, str]) -> str:
    """Return the fusion buffer's size and the cycle time, the two settings that are tuned, in one phrase."""
    fusion, cycle = (float({**DEFAULTS, **settings}[name]) for name in (FUSION, CYCLE))
    return f"fusion {fusion / 2**20:6.1f} MB  cycle {cycle:5.2f} ms"
