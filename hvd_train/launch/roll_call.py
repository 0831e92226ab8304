"""Before the ranks meet: who is here, who is missing, and whether all run the same.

What Horovod would do otherwise with a rank that never comes is wait without a word, or fail without its name. The call
goes by what the ranks have before they have Horovod: the launcher's key-value store (Gloo), or MPI.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_train.errors import HvdTrainError, RankLost, UsageError
from hvd_train.launch import launcher
from hvd_train.launch.client import ADDRESS, ask
from hvd_train.launch.launcher import Launch

PATIENCE = "HVD_TRAIN_START_TIMEOUT_SECONDS"
HOSTS = "HVD_TRAIN_HOSTS"  # NAME:SLOTS,... in the order of ranks, from the scripts that know it
_PATIENCE_S = 600.0
_WORDS_AFTER_S = 15.0  # then after twice as long, and so on
_EVERY_S, _ANSWER_S = 0.1, 30.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_LOOK_S, _LOOKS = 1.0, 3  # the launcher has gone where it is found so several times in a row
_ALL_WELL, _MISSING = "go", "missing: "
_calls = itertools.count()


class Board(Protocol):
    """Where ranks write for one another."""

    def put(self, name: str, text: str) -> None:
        """Write. Raises OSError."""

    def get(self, name: str) -> str | None:
        """What was written there, or None. Raises OSError."""


@dataclass(frozen=True)
class LaunchersStore:
    """The key-value store that a launcher of Horovod's serves for Gloo."""

    environ: Mapping[str, str]

    def put(self, name: str, text: str) -> None:
        """See Board."""
        ask(self.environ, f"hvd_train/{name}", _ANSWER_S, put=text)

    def get(self, name: str) -> str | None:
        """See Board."""
        try:
            return ask(self.environ, f"hvd_train/{name}", _ANSWER_S)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None


def store(environ: Mapping[str, str]) -> Board | None:
    """The launcher's store, where there is one: not under MPI, and not for ranks that come and go."""
    by_gloo = ADDRESS in environ and "HOROVOD_RANK" in environ
    return LaunchersStore(environ) if by_gloo and not launcher.elastic(environ) else None


def launcher_gone(environ: Mapping[str, str]) -> bool:
    """Whether there is a launcher's store no more. Ranks on other hosts learn of its end in no other way."""
    board = store(environ)
    if board is None:
        return False
    try:
        board.get("started.0")
    except OSError:
        return True
    return False


def started(environ: Mapping[str, str]) -> None:
    """Say that this rank's process has started: its imports may take minutes on a file system that hosts share.

    Should the launcher end before the ranks meet, this process ends, too, whatever its imports are waiting for.
    """
    board = store(environ)
    if board is not None:
        with suppress(OSError):  # `call` will say what is wrong with the store
            board.put(f"started.{environ['HOROVOD_RANK']}", socket.gethostname())
        threading.Thread(target=_end_with_launcher, args=(environ,), daemon=True, name="launcher").start()


_met = threading.Event()


def _end_with_launcher(environ: Mapping[str, str]) -> None:
    gone = 0
    while not _met.wait(_LOOK_S) and gone < _LOOKS:
        gone = gone + 1 if launcher_gone(environ) else 0
    if not _met.is_set():
        os._exit(1)


def call(
    board: Board,
    rank: int,
    size: int,
    facts: Mapping[str, str],
    environ: Mapping[str, str],
    say: Callable[[str], None] | None = None,
) -> None:
    """Wait until every rank is here; on all of them, raise UsageError where `facts` differ.

    Rank 0 asks for the others, and says whom it waits for; it is itself waited for by rank 1. Raises RankLost after
    `HVD_TRAIN_START_TIMEOUT_SECONDS` (600), with the missing ranks, UsageError where that is no number.
    """
    number = next(_calls)
    wait = _Wait(board, number, _patience(environ), environ.get(HOSTS, ""), say or _say)
    try:
        board.put(f"here.{number}.{rank}", json.dumps({"host": socket.gethostname(), **facts}))
        if rank == 0:
            verdict = wait.for_ranks(range(1, size), speaks=True)
            if verdict is None:
                answers = [board.get(f"here.{number}.{other}") for other in range(size)]
                verdict = disagreement([json.loads(answer) for answer in answers if answer]) or _ALL_WELL
            if verdict != _ALL_WELL:
                wait.say(verdict.removeprefix(_MISSING))  # before the first rank that hears of it ends the job
            board.put(f"verdict.{number}", verdict)
        else:
            verdict = wait.for_verdict(rank)
    except OSError as error:
        raise RankLost(f"the launcher cannot be reached ({error})") from None
    _met.set()  # from here on the ranks see one another's end
    if verdict != _ALL_WELL:
        raise _told(verdict, by_rank_0=rank == 0 or not wait.rank_0_is_missing)


def _patience(environ: Mapping[str, str]) -> float:
    try:
        return float(environ.get(PATIENCE, _PATIENCE_S))
    except ValueError:
        raise UsageError(f"{PATIENCE} is {environ[PATIENCE]!r}; it must be a number of seconds") from None


def _told(verdict: str, *, by_rank_0: bool) -> HvdTrainError:
    missing = verdict.startswith(_MISSING)
    error = RankLost(verdict.removeprefix(_MISSING)) if missing else UsageError(verdict)
    error.told = by_rank_0
    return error


@dataclass
class _Wait:
    board: Board
    number: int
    patience_s: float
    hosts: str
    say: Callable[[str], None]
    rank_0_is_missing: bool = False

    def for_ranks(self, ranks: Sequence[int], *, speaks: bool) -> str | None:
        """Until they are here, or the verdict that they are missing."""
        begun, words_after = time.monotonic(), _WORDS_AFTER_S
        missing = list(ranks)
        while missing := [rank for rank in missing if self.board.get(f"here.{self.number}.{rank}") is None]:
            waited = time.monotonic() - begun
            if waited > self.patience_s:
                return (
                    f"{_MISSING}{self._names(missing)} did not come within {waited:.0f} s: look at what runs there, "
                    f"or export {PATIENCE} with more seconds"
                )
            if speaks and waited > words_after:
                self.say(f"waiting for {self._names(missing)} ({waited:.0f} s)")
                words_after *= 2
            time.sleep(_EVERY_S)
        return None

    def for_verdict(self, rank: int) -> str:
        """Rank 0's, or that it is missing itself."""
        if missing := self.for_ranks([0], speaks=rank == 1):
            self.rank_0_is_missing = True
            return missing
        while (verdict := self.board.get(f"verdict.{self.number}")) is None:
            time.sleep(_EVERY_S)
        return verdict

    def _names(self, ranks: Sequence[int], most: int = 6) -> str:
        shown = []
        for rank in ranks[:most]:
            host = self.board.get(f"started.{rank}")
            listed = host_of(rank, self.hosts)
            where = f" on {host or listed}" if host or listed else ""
            shown.append(f"rank {rank}{where}{'' if host else ' (nothing heard of it)'}")
        return ", ".join(shown) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def host_of(rank: int, hosts: str) -> str | None:
    """The host of a rank, where NAME:SLOTS,... stand in the order of ranks."""
    for name, _, slots in (entry.rpartition(":") for entry in hosts.split(",")):
        if not slots.isdigit():
            return None
        if rank < int(slots):
            return name
        rank -= int(slots)
    return None


def disagreement(of_ranks: Sequence[Mapping[str, str]]) -> str | None:
    """The first fact in which ranks differ, with who has what; `host` is each one's own."""
    for name in dict.fromkeys(name for facts in of_ranks for name in facts if name != "host"):
        groups: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            groups.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(groups) > 1:
            shown = []
            for value, ranks in groups.items():
                hosts = dict.fromkeys(of_ranks[rank]["host"] for rank in ranks)
                shown.append(f"{value} on {', '.join(hosts)} (rank{'s' * (len(ranks) > 1)} {_short(ranks)})")
            return f"the ranks differ in {name}: {'; '.join(shown)}; {_cure(name)}"
    return None


def stranger(of_job: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """The first fact in which a worker is not like the job it wants to join; each has its `host` among them."""
    for name in (name for name in {**of_job, **own} if name != "host"):
        values = [facts.get(name, "nothing") for facts in (own, of_job)]
        if values[0] != values[1]:
            there, here = own["host"], of_job["host"]
            return f"{there} differs from the job in {name}: {values[0]} there, {values[1]} on {here}; {_cure(name)}"
    return None


def _cure(name: str) -> str:
    return "start all of them with the same arguments" if name.startswith("--") else "set up the same on all"


def _short(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")


def over_mpi(environ: Mapping[str, str]) -> bool:
    """Whether the ranks of this job meet by MPI."""
    started_by_mpi = any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    return started_by_mpi and environ.get("HOROVOD_CONTROLLER", "mpi") == "mpi"


def call_over_mpi(communicator: Any, facts: Mapping[str, str]) -> None:
    """As `call`, among the ranks of a communicator (mpi4py's), which all come. Raises UsageError."""
    come_together(communicator)
    of_ranks = communicator.allgather({"host": socket.gethostname(), **facts})
    if problem := disagreement(of_ranks):
        if communicator.rank == 0:
            _say(problem)
        communicator.barrier()  # the first one that ends ends the job
        raise _told(problem, by_rank_0=True)


def come_together(communicator: Any) -> None:
    """Wait until all its ranks are here, asleep.

    MPI itself waits busily: who has finished would take the core from a rank that still trains, and on some kernels
    (Linux 6.18) threads that yield in turn keep even those that write files to disk from running, for minutes.
    """
    all_here, pause = communicator.Ibarrier(), _SHORTEST_PAUSE_S
    while not all_here.Test():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@contextmanager
def saying_that_it_waits(launched: Launch | None) -> Iterator[None]:
    """While MPI waits for all ranks, which it does without a word: each says so, and those that do not are missing."""
    done = threading.Event()

    def say() -> None:
        waited = _WORDS_AFTER_S
        while not done.wait(waited if waited == _WORDS_AFTER_S else waited / 2):
            who = f"rank {launched.rank if launched else '?'} on {socket.gethostname()}"
            _say(f"{who} has been waiting for other ranks for {waited:.0f} s; those that do not say so are missing")
            waited *= 2

    threading.Thread(target=say, daemon=True, name="roll call").start()
    try:
        yield
    finally:
        done.set()


def _say(text: str) -> None:
    print(f"hvd-train: {text}", file=sys.stderr, flush=True)
