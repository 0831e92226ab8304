"""What a worker of an elastic job and our driver say to each other: it lives, it is ready; what is wanted of it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, MutableMapping

from hvd_train.errors import UsageError
from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from hvd_train.world.world import Wish

_EVERY_S = 1.0
_ANSWER_S = 2.0
GONE_S = 10.0  # no answer for so long: the launcher is gone, or out of reach
_COMMIT_S = 30.0  # and so long to commit then
_RANK_AND_SIZE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class Pulse:
    """Beats in a thread of its own; `wish` is what the driver said last, or "stop" where it has gone."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.wish: Wish = "train"
        if WORKER in environ:  # Horovod's own driver does not listen
            threading.Thread(target=self._beat, args=(dict(environ),), daemon=True, name="pulse").start()

    def met(self) -> None:
        """The ranks have met: a change that was wished for until then has happened. Another is told every second."""
        if self.wish == "change":
            self.wish = "train"

    def _beat(self, environ: Mapping[str, str]) -> None:
        answered = time.monotonic()
        while True:
            try:
                said = client.get(environ, f"heartbeat/{environ[WORKER]}", _ANSWER_S)
            except OSError:
                silent = time.monotonic() - answered
                if silent > GONE_S:
                    self.wish = "stop"
                if silent > GONE_S + _COMMIT_S:
                    os._exit(1)
            else:
                answered = time.monotonic()
                if said == "end":
                    os._exit(1)
                if self.wish != "stop":
                    self.wish = "change" if said == "change" else "stop" if said == "stop" else "train"
            time.sleep(_EVERY_S)


def announce(environ: Mapping[str, str]) -> None:
    """Tell our driver, by the number, that this process is about to ask for its next rank, as Horovod's core does.

    The core asks by host and local rank, which may be another process's by now: one that was silent for a while has
    been replaced. Raises SystemExit (0) for such a one, OSError where the driver is gone.
    """
    if WORKER in environ and client.get(environ, f"may_ask/{environ[WORKER]}") == "end":
        raise SystemExit(0)


def ask_for_rank(environ: MutableMapping[str, str], facts: Mapping[str, str]) -> None:
    """Wait until the driver has a rank for this process, and note it where Horovod's core looks for it.

    Asking is how a process says that it is ready: the others go on training until then. Horovod's own driver has
    given a rank already. Raises UsageError where `facts` are not those of the job, OSError where the driver is gone,
    SystemExit (0) where there is no rank any more.
    """
    if WORKER not in environ:
        return
    client.put(environ, f"facts/{environ[WORKER]}", json.dumps({"host": environ["HOROVOD_HOSTNAME"], **facts}))
    if problem := client.get(environ, f"problem/{environ[WORKER]}"):
        raise UsageError(problem)
    values = client.get(environ, f"rank_and_size/{environ['HOROVOD_HOSTNAME']}:{environ[WORKER]}").split(",")
    if values[0] == "-1":
        raise SystemExit(0)
    environ.update({f"HOROVOD_{what}": value for what, value in zip(_RANK_AND_SIZE, values, strict=True)})
