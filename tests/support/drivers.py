"""A driver of an elastic job that finds no hosts and has no server, and what it puts in Horovod's place."""

from __future__ import annotations

from typing import Any

from hvd_train.elastic.driver import REPLACEMENTS, Driver


class Rendezvous:
    """Takes the place of Horovod's rendezvous server."""

    def init(self, ranks: object) -> None:
        """Nobody meets here."""

    def stop(self) -> None:
        """Nothing runs."""


class NoHosts:
    """A discovery that finds nothing."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """No hosts."""
        return {}


def driver(timeout: int = 600) -> Driver:
    """A driver whose job has not been started."""
    return Driver(Rendezvous(), NoHosts(), 1, None, timeout)


def replacement_of(name: str) -> Any:
    """What the driver puts in the place of a name of Horovod's launcher."""
    found = next(replacement for replacement in REPLACEMENTS if replacement.name == name)
    return found.make(getattr(found.module, name))
