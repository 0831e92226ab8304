"""The roll call before the rendezvous: name missing ranks, which Horovod does not, and compare what ranks run.

Over Gloo it uses the launcher's key-value store. Each rank writes that its process has started, and later that it is
here, with facts. Rank 0 waits for all ranks, compares and writes a verdict, for which the others wait. Rank 1 reports
if rank 0 is missing. They wait at the store (patch C14), so the number of requests is linear in the number of ranks.
MPI itself waits for ranks, busily and silently; `HorovodWorld` compares them once they have connected.
"""

import io
import itertools
import json
import os
import socket
import threading
import time
import urllib.error
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvd_train.console import say as print_line
from hvd_train.errors import HvdTrainError, RankLost, UsageError, first_few, whole_number
from hvd_train.launch import client, launcher

PATIENCE = "HVD_TRAIN_START_TIMEOUT_SECONDS"
_FIRST_NOTICE_S = 15.0  # doubles with each notice
_REQUEST_S = 30.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05  # while MPI waits
_ALL_WELL, _MISSING = "go", "missing: "
_calls = itertools.count()
_called = threading.Event()


@dataclass(frozen=True)
class LauncherStore:
    """The key-value store that Horovod's launcher serves for Gloo."""

    environ: Mapping[str, str]

    def put(self, scope: str, rank: int, text: str) -> None:
        """Write the text of a rank. Raises OSError if the store cannot be reached."""
        client.put(self.environ, f"hvd_train.{scope}/{rank}", text, _REQUEST_S)

    def wait_for(self, scope: str, ranks: int) -> list[str] | None:
        """Return the texts of so many ranks, or None if not all of them come within a second."""
        texts = self.get(scope, f"all-of-{ranks}")
        return None if texts is None else texts.split("\n")

    def get(self, scope: str, rank: int | str) -> str | None:
        """Return the text of a rank, or None if there is none. Raises OSError as `put` does."""
        try:
            return client.get(self.environ, f"hvd_train.{scope}/{rank}", _REQUEST_S)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None


def store(environ: Mapping[str, str]) -> LauncherStore | None:
    """Return the launcher's store, or None if there is none (MPI) or in an elastic job."""
    has_store = client.ADDRESS in environ and "HOROVOD_RANK" in environ
    return LauncherStore(environ) if has_store and not launcher.elastic(environ) else None


def launcher_gone(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher's store no longer answers; ranks on other hosts have no other sign."""
    try:
        if (board := store(environ)) is not None:
            board.get("started", 0)
    except OSError:
        return True
    return False


def started(environ: Mapping[str, str]) -> None:
    """Write that this process has started; until the roll call it ends with the launcher, even if an import hangs."""
    if (board := store(environ)) is not None:
        with suppress(OSError):  # `call` reports an error of the store
            board.put("started", int(environ["HOROVOD_RANK"]), socket.gethostname())
        threading.Thread(target=_end_with_launcher, args=(environ,), daemon=True, name="launcher").start()


def _end_with_launcher(environ: Mapping[str, str]) -> None:
    failed = 0
    while failed < 3 and not _called.wait(1.0):
        failed = failed + 1 if launcher_gone(environ) else 0
    if not _called.is_set():
        os._exit(1)


def call(
    board: LauncherStore,
    rank: int,
    size: int,
    facts: Mapping[str, str],
    environ: Mapping[str, str],
    say: Callable[[str], None] = print_line,
) -> None:
    """Wait until all ranks are here and run the same; `say` prints lines about waiting and problems.

    Raises UsageError on every rank if `facts` differ or HVD_TRAIN_START_TIMEOUT_SECONDS is no number. Raises RankLost
    if ranks are missing after that many seconds (default: 600), or if the launcher cannot be reached.
    """
    number, patience_s = next(_calls), whole_number(environ.get(PATIENCE, "600"))
    if patience_s is None:
        raise UsageError(f"{PATIENCE} is {environ[PATIENCE]!r}; it must be a number of seconds")
    try:
        board.put(here := f"here.{number}", rank, json.dumps({"host": socket.gethostname(), **facts}))
        awaited, others = ((here, size), range(1, size)) if rank == 0 else ((f"verdict.{number}", 1), range(1))
        texts, lost = _wait(board, awaited, here, others, patience_s, say if rank < 2 else None)
        verdict = lost or (texts[0] if rank else disagreement([json.loads(text) for text in texts]) or _ALL_WELL)
        if rank == 0:
            if verdict != _ALL_WELL:
                say(verdict.removeprefix(_MISSING))  # first: a rank that reads the verdict ends the job
            board.put(f"verdict.{number}", 0, verdict)
    except OSError as error:
        raise RankLost(f"the launcher cannot be reached ({error})") from None
    _called.set()
    if verdict != _ALL_WELL:
        raise error_for(verdict, by_rank_0=rank == 0 or not lost)


def error_for(verdict: str, *, by_rank_0: bool) -> HvdTrainError:
    """Return the error for a verdict; `by_rank_0` means that rank 0 has printed it already."""
    is_missing = verdict.startswith(_MISSING)
    error = RankLost(verdict.removeprefix(_MISSING)) if is_missing else UsageError(verdict)
    error.reported = by_rank_0
    return error


def _wait(
    board: LauncherStore,
    awaited: tuple[str, int],
    here: str,
    others: Sequence[int],
    patience_s: float,
    say: Callable[[str], None] | None,
) -> tuple[list[str], str]:
    """Return the texts of a scope when it has so many; or a verdict if it takes too long and ranks are not here."""
    begun, notice_after = time.monotonic(), _FIRST_NOTICE_S
    while (texts := board.wait_for(*awaited)) is None:
        waited = time.monotonic() - begun
        if waited <= min(notice_after, patience_s):
            continue
        if missing := [rank for rank in others if board.get(here, rank) is None]:
            described = _describe(missing, board)
            if waited > patience_s:
                cure = f"look at what runs there, or export {PATIENCE} with more seconds"
                return [], f"{_MISSING}{described} did not come within {waited:.0f} s: {cure}"
            if say:
                say(f"waiting for {described} ({waited:.0f} s)")
        notice_after *= 2
    return texts, ""


def _describe(ranks: Sequence[int], board: LauncherStore) -> str:
    hosts = {rank: board.get("started", rank) for rank in ranks}
    states = {rank: f"on {host}" if host else "(process not started yet)" for rank, host in hosts.items()}
    return first_few([f"rank {rank} {state}" for rank, state in states.items()], 6)


def disagreement(facts_of_ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Return the first fact but `host` in which ranks differ, and each rank's value, in one line; None if all agree."""
    for name in dict.fromkeys(name for facts in facts_of_ranks for name in facts if name != "host"):
        ranks_with: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            ranks_with.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks_with) > 1:
            shown = []
            for value, ranks in ranks_with.items():
                hosts = ", ".join(dict.fromkeys(facts_of_ranks[rank]["host"] for rank in ranks))
                shown.append(f"{value} on {hosts} (rank{'s' if len(ranks) > 1 else ''} {first_few(ranks, 8)})")
            return f"the ranks differ in {name}: {'; '.join(shown)}; {_cure(name)}"
    return None


def difference_from_job(job: Mapping[str, str], worker: Mapping[str, str]) -> str | None:
    """Return the first fact but `host` in which a worker differs from the job that it joins, in one line, or None."""
    for name in {**job, **worker}:
        ours, theirs = job.get(name, "nothing"), worker.get(name, "nothing")
        if name != "host" and ours != theirs:
            values = f"{theirs} there, {ours} on {job['host']}"
            return f"{worker['host']} differs from the job in {name}: {values}; {_cure(name)}"
    return None


def _cure(name: str) -> str:
    return "start all of them with the same arguments" if name.startswith("--") else "set up the same on all"


def gathered(communicator: Any, text: str) -> list[str]:
    """Gather the texts of all ranks of an mpi4py communicator on each rank."""
    sent = text.encode()  # mpi4py's own gather sends pickles, which may run code when they are read
    lengths = array("q", [0]) * communicator.size
    communicator.Allgather(array("q", [len(sent)]), lengths)
    received = bytearray(sum(lengths))
    communicator.Allgatherv(sent, [received, lengths.tolist()])
    texts = io.BytesIO(received)
    return [texts.read(length).decode() for length in lengths]


def come_together(communicator: Any) -> None:
    """Wait, asleep, until all ranks of an mpi4py communicator are here.

    MPI waits busily: a finished rank would take the core from ranks that train, and from threads that write files.
    """
    all_here, pause = communicator.Ibarrier(), _SHORTEST_PAUSE_S
    while not all_here.Test():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
