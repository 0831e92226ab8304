"""The roll call before the rendezvous over Gloo, which names missing ranks, as Horovod
does not; comparing facts.

The roll call uses the launcher's key-value store. Each rank writes that its process has started,
and later that it is here, and waits at the store until all are (patch C14), so the number of
requests is linear in the number of ranks. MPI itself waits for ranks, busily and silently. Once the
ranks have connected, `World.compare` compares what they run.
"""

import itertools
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvd_train.console import say
from hvd_train.errors import RankLost, UsageError, first_few, whole_number
from hvd_train.launch import client, workers

PATIENCE = "HVD_TRAIN_START_TIMEOUT_SECONDS"
_FIRST_NOTICE_S = 15.0  # doubles with each notice
_REQUEST_S = 30.0
_PROBE_S = 5.0
_calls = itertools.count()


def has_store(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher serves a key-value store for ranks: with
    Gloo, except in elastic jobs.
    """
    return client.ADDRESS in environ and "HOROVOD_RANK" in environ and not workers.elastic(environ)


def started(environ: Mapping[str, str]) -> None:
    """Write that this process has started, before it imports torch."""
    if has_store(environ):
        with suppress(OSError):  # `call` reports an error of the store
            _put(environ, f"started/{environ['HOROVOD_RANK']}", socket.gethostname())


def has_come(environ: Mapping[str, str]) -> bool:
    """Return whether a process of this rank has come to the first roll call. Raises OSError."""
    return bool(client.get(environ, f"hvd_train.here.0/{environ['HOROVOD_RANK']}", _PROBE_S))


def call(environ: Mapping[str, str]) -> None:
    """Wait until all ranks are here; rank 0 prints which ranks it waits for, and the
    others look for rank 0 alone.

    Raises UsageError if HVD_TRAIN_START_TIMEOUT_SECONDS is no number. Raises RankLost if ranks are
    missing after that many seconds (default: 600), or if the launcher cannot be reached.
    """
    if (patience_s := whole_number(environ.get(PATIENCE, "600"))) is None:
        raise UsageError(f"{PATIENCE} is {environ[PATIENCE]!r}; it must be a number of seconds")
    rank = int(environ["HOROVOD_RANK"])
    size = int(environ["HOROVOD_SIZE"])
    here = f"here.{next(_calls)}"
    begun = time.monotonic()
    notice_s = _FIRST_NOTICE_S
    try:
        _put(environ, f"{here}/{rank}", "yes")
        while not _get(environ, f"{here}/all-of-{size}"):  # the store has waited a second for them
            waited = time.monotonic() - begun
            if waited <= min(notice_s, patience_s):
                continue
            notice_s *= 2
            absent = []
            for other in range(1 if rank else size):
                if not _get(environ, f"{here}/{other}"):
                    host = _get(environ, f"started/{other}")
                    absent.append(f"rank {other} {f'on {host}' if host else '(not started)'}")
            missing = first_few(absent)
            if missing and waited > patience_s:
                cure = f"look at what runs there, or export {PATIENCE} with more seconds"
                raise RankLost(f"{missing} did not come within {waited:.0f} s: {cure}")
            if missing and rank == 0:
                say(f"waiting for {missing} ({waited:.0f} s)")
    except OSError as error:
        raise RankLost(f"the launcher cannot be reached ({error})") from None


def _put(environ: Mapping[str, str], path: str, text: str) -> None:
    client.put(environ, f"hvd_train.{path}", text, _REQUEST_S)


def _get(environ: Mapping[str, str], path: str) -> str:
    return client.get(environ, f"hvd_train.{path}", _REQUEST_S)


def disagreement(facts_of: Sequence[Mapping[str, str]]) -> str | None:
    """Return the first fact but `who` that differs, and `who` has which value, in
    one line; None if all agree.

    The name of a fact may end with "; " and what to do.
    """
    for name in dict.fromkeys(name for facts in facts_of for name in facts if name != "who"):
        holders: dict[str, list[str]] = {}
        for facts in facts_of:
            holders.setdefault(facts.get(name, "nothing"), []).append(facts["who"])
        if len(holders) > 1:
            values = "; ".join(
                f"{value} on {first_few(those, 8)}" for value, those in holders.items()
            )
            what, _, cure = name.partition("; ")
            usual = (
                "start all of them with the same arguments"
                if name.startswith("--")
                else "set up the same on all"
            )
            return f"the ranks differ in {what}: {values}; {cure or usual}"
    return None
