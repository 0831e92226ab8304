"""The heartbeat of an elastic worker, and how it asks our driver for a rank."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, MutableMapping

from hvd_train.errors import UsageError
from hvd_train.launch import addresses, client
from hvd_train.launch.launcher import WORKER
from hvd_train.progress.clock import RunningClock
from hvd_train.world.world import DriverLost, Request

_EVERY_S = 1.0
_ANSWER_S = 2.0
_PAUSED_S = 5.0  # a beat takes 3 s if the driver is silent: after a longer time this process was paused
GONE_S = 10.0  # after so long without an answer the driver counts as gone, or out of reach
GONE_WHILE_LEAVING_S = 3.0  # where this process was told to end: it may soon be killed, or its driver has been
_COMMIT_S = 30.0  # the time that this process then has to come to its last commit
_WRITE_S = 600.0  # and the time for writing it
_ANSWERS = ("train", "change", "stop", "end")
_RANK_AND_SIZE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class Heartbeat:
    """Tells our driver once a second, from a thread of its own, that this worker is alive.

    `requested` is what the job asks of it: "train", "change" or "stop". That is what the driver has answered last;
    "change" from the moment on when it answers that the job has given this worker up, and "stop" where it has not
    answered for `GONE_S` seconds. In these two cases the worker commits what it can and ends; the process is ended
    if that takes too long. Nothing is sent before `start`.
    """

    def __init__(self) -> None:
        self.requested: Request = "train"
        self._got_signal = self._evicted = False
        self._wake = threading.Event()
        self.now = RunningClock(_PAUSED_S)
        self._all_was_well = self.now()
        self._patience_s = GONE_S + _COMMIT_S

    def start(self, environ: Mapping[str, str]) -> None:
        """Begin to tell the driver, which `environ` names, and to hear what it answers."""
        threading.Thread(target=self._beat, args=(dict(environ),), daemon=True, name="heartbeat").start()

    @property
    def driver_gone(self) -> bool:
        """Whether the driver has not answered for so long that it counts as gone."""
        return self.now() - self._all_was_well > GONE_S and not self._evicted

    @property
    def silent_since(self) -> float:
        """When the driver was heard last, by `now`; where it has given this worker up, that is now."""
        return self.now() if self._evicted else self._all_was_well

    def signal_received(self) -> None:
        """Tell the driver at once that this worker was told to end by a signal; the driver answers how it is to."""
        if not self._got_signal:
            self._got_signal = True
            self._wake.set()

    def world_formed(self) -> None:
        """Note that the ranks have met: the change that was requested until now has happened."""
        if self.requested == "change":
            self.requested = "train"  # a further change is requested again with the next beat

    def training_left(self) -> None:
        """Note that this worker trains no more: whatever it still has to write, it may take its time for."""
        self._patience_s = self.now() - self._all_was_well + _WRITE_S

    def all_written(self) -> None:
        """Note that this process has nothing left to do but to end."""
        self._patience_s = self.now() - self._all_was_well + _COMMIT_S

    def _beat(self, environ: Mapping[str, str]) -> None:
        self._all_was_well = self.now()
        while True:
            self._hear(_answer(environ, "leaving" if self._got_signal else "heartbeat"))
            if self.now() - self._all_was_well > self._patience_s:
                os._exit(1)
            self._pause()

    def _hear(self, answer: str | None) -> None:
        now_evicted = answer == "end" and not self._evicted
        self._evicted = self._evicted or now_evicted
        if now_evicted or (answer is not None and not self._evicted):
            self._all_was_well = self.now()
        silence_s = self.now() - self._all_was_well
        if self.requested == "stop":
            return
        if self._evicted:  # others may go on without this one: its wish to stop must not be theirs
            self.requested = "change"
        elif answer == "stop" or silence_s > (GONE_WHILE_LEAVING_S if self._got_signal else GONE_S):
            self.requested = "stop"
        elif answer is not None:
            self.requested = "change" if answer == "change" else "train"

    def _pause(self) -> None:
        self._wake.wait(_EVERY_S)
        self._wake.clear()


def _answer(environ: Mapping[str, str], scope: str) -> str | None:
    """Return what the driver answers to a beat, None where it does not."""
    try:
        answer = client.get(environ, f"{scope}/{environ[WORKER]}", _ANSWER_S)
    except OSError:
        return None
    return answer if answer in _ANSWERS else None


def announce_rejoining(environ: Mapping[str, str], beat: Heartbeat, not_met: str = "") -> None:
    """Tell our driver that this worker leaves its world, and that Horovod's core is about to ask for its next rank.

    `not_met` is why its ranks have not come to one state; empty where they have. The core asks by host and local rank,
    which may be another process's by now: a worker that was silent for a while has been replaced. A driver that is out
    of reach is asked again until it has not answered `beat` for `GONE_S` seconds either. Raises SystemExit (0) in a
    worker that has been given up, DriverLost if the driver is gone.
    """
    deadline = beat.silent_since + GONE_S
    while True:
        try:
            if not_met:
                client.put(environ, f"not_met/{environ[WORKER]}", not_met, _ANSWER_S)
            answer = client.get(environ, f"may_ask/{environ[WORKER]}", _ANSWER_S)
            break
        except OSError as error:
            if beat.now() > deadline:
                raise DriverLost(f"the driver has not answered for {GONE_S:.0f} s ({error})") from error
            time.sleep(_EVERY_S)
    if answer == "end":
        raise SystemExit(0)


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Set the network interface by which Horovod's core is about to meet the other ranks.

    On the driver's own host that is a question of whether the job has come to other hosts by now. Raises OSError if the
    driver cannot be reached, UsageError if this host lacks the interfaces that the user has named.
    """
    addresses.choose_interface(environ, client.get(environ, f"elsewhere/{environ[WORKER]}", _ANSWER_S))


def wait_for_first_rank(environ: MutableMapping[str, str], facts: Mapping[str, str]) -> None:
    """Wait until our driver has a rank for this worker, and set the variables in which Horovod's core looks for it.

    Asking tells the driver that the worker is ready; the others train until then. Raises UsageError if `facts` are not
    those of the job, OSError if the driver cannot be reached, SystemExit (0) if there is no rank for this worker any
    more.
    """
    client.put(environ, f"facts/{environ[WORKER]}", json.dumps({"host": environ["HOROVOD_HOSTNAME"], **facts}))
    if difference := client.get(environ, f"problem/{environ[WORKER]}"):
        raise UsageError(difference)
    values = client.get(environ, f"rank_and_size/{environ['HOROVOD_HOSTNAME']}:{environ[WORKER]}").split(",")
    if values[0] == "-1":
        raise SystemExit(0)
    environ.update({f"HOROVOD_{name}": value for name, value in zip(_RANK_AND_SIZE, values, strict=True)})
