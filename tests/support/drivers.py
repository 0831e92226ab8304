"""A driver of an elastic job without hosts or a server, and its replacements of Horovod's functions."""

from typing import Any
from unittest.mock import Mock

from hvd_train.elastic.driver import REPLACEMENTS, Driver


def driver(least: int = 1, most: int | None = None, timeout: int | None = 600) -> Driver:
    return Driver(Mock(), Mock(find_available_hosts_and_slots=dict), least, most, timeout)


def replacement_of(name: str) -> Any:
    """Return what the driver puts in the place of a function of Horovod's launcher."""
    return next(replacement.ours for replacement in REPLACEMENTS if replacement.name == name)
