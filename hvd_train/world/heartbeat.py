"""The heartbeat of an elastic worker, and how it asks our driver for a rank."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, MutableMapping

from hvd_train.errors import UsageError
from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from hvd_train.world.world import Request

_EVERY_S = 1.0
_ANSWER_S = 2.0
GONE_S = 10.0  # after so long without an answer the driver counts as gone, or out of reach
_COMMIT_S = 30.0  # the time that this process then has for its last commit
_RANK_AND_SIZE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class Heartbeat:
    """Tells our driver once a second, from a thread of its own, that this worker is alive.

    `requested` is what the driver answered last: "train", "change" or "stop". It becomes "stop" where the driver has
    not answered for `GONE_S` seconds. The process ends where it goes on without a driver for longer than a last commit
    takes, and where the driver answers that the job has given it up. Under Horovod's own driver nothing is sent.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.requested: Request = "train"
        if WORKER in environ:
            threading.Thread(target=self._beat, args=(dict(environ),), daemon=True, name="heartbeat").start()

    def world_formed(self) -> None:
        """Note that the ranks have met: the change that was requested until now has happened."""
        if self.requested == "change":
            self.requested = "train"  # a further change is requested again with the next beat

    def _beat(self, environ: Mapping[str, str]) -> None:
        answered = time.monotonic()
        while True:
            try:
                answer = client.get(environ, f"heartbeat/{environ[WORKER]}", _ANSWER_S)
            except OSError:
                silence = time.monotonic() - answered
                if silence > GONE_S:
                    self.requested = "stop"
                if silence > GONE_S + _COMMIT_S:
                    os._exit(1)
            else:
                answered = time.monotonic()
                if answer == "end":
                    os._exit(1)
                if self.requested != "stop":
                    self.requested = "change" if answer == "change" else "stop" if answer == "stop" else "train"
            time.sleep(_EVERY_S)


def announce_rejoining(environ: Mapping[str, str]) -> None:
    """Tell our driver that this worker leaves its world, and that Horovod's core is about to ask for its next rank.

    The core asks by host and local rank, which may be another process's by now: a worker that was silent for a while
    has been replaced. Raises SystemExit (0) in such a worker, OSError where the driver cannot be reached.
    """
    if WORKER in environ and client.get(environ, f"may_ask/{environ[WORKER]}") == "end":
        raise SystemExit(0)


def wait_for_first_rank(environ: MutableMapping[str, str], facts: Mapping[str, str]) -> None:
    """Wait until our driver has a rank for this worker, and set the variables in which Horovod's core looks for it.

    Asking tells the driver that the worker is ready; the others go on training until then. Under Horovod's own driver
    the rank is there from the start. Raises UsageError where `facts` are not those of the job, OSError where the driver
    cannot be reached, SystemExit (0) where there is no rank for this worker any more.
    """
    if WORKER not in environ:
        return
    client.put(environ, f"facts/{environ[WORKER]}", json.dumps({"host": environ["HOROVOD_HOSTNAME"], **facts}))
    if difference := client.get(environ, f"problem/{environ[WORKER]}"):
        raise UsageError(difference)
    values = client.get(environ, f"rank_and_size/{environ['HOROVOD_HOSTNAME']}:{environ[WORKER]}").split(",")
    if values[0] == "-1":
        raise SystemExit(0)
    environ.update({f"HOROVOD_{name}": value for name, value in zip(_RANK_AND_SIZE, values, strict=True)})
