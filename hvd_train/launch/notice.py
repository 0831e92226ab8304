"""Say by itself why a job hangs, in a process of its own next to rank 0: `notice.py FILE SECONDS`.

No torch. C code in rank 0 may hold Python's lock, so this is no thread.

Once a second it reads the place of rank 0, in the `FILE` of `stacks`. If that does not change, it
asks all ranks as `hvd-train why` does. If one of them has waited for the others for `SECONDS`, it
prints the answer, once a hang.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from hvd_train.console import PROGRAM, outlive, printable, show
from hvd_train.errors import whole_number
from hvd_train.launch import child, stacks
from hvd_train.launch.cause import kind_of
from hvd_train.launch.why import explain

_EVERY_S = 1.0
# An answer takes 3 s, and 10 s if a host is out of reach.
_EARLY_S = 8.0
_PAUSED_S = 5.0  # without a look: the whole job was paused
_NOTICE_S = 60  # Horovod's default
_ERROR_OUTPUT = 2


class Notice:
    """The process that says why ranks hang. It ends with this process, or with `watch([])`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def watch(self, members: Sequence[tuple[str, int]]) -> None:
        """Watch these ranks, which are hosts and processes, in place of others; this is rank 0."""
        with suppress(OSError):  # a job can train without it
            if self._process is None and members:
                self._process = _started()
            if self._process is not None and members:
                print(json.dumps(members), file=self._process.stdin, flush=True)
            elif self._process is not None:
                self._process.communicate()
                self._process = None


def _started() -> "subprocess.Popen[str] | None":
    file = stacks.file()
    if file is None or whole_number(os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "")):
        return None
    given = whole_number(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", ""))
    words = ["-m", "hvd_train.launch.notice", str(file), str(given or _NOTICE_S)]
    return child.beside(words, stdout=_ERROR_OUTPUT, pass_fds=[file])


class Patience:
    """When to ask why a job does not go on, and when to say it.

    Pure: `now` is in seconds on any clock.
    """

    def __init__(self, notice_s: float) -> None:
        """`notice_s` is how long a rank may wait for others."""
        self._notice_s = notice_s
        self._early_s = min(_EARLY_S, notice_s / 2)
        self._seen = b""
        self._last = -math.inf
        self._due = math.inf  # when a rank may have waited for so long
        self._knows = False  # whether one will have, unless rank 0 goes on

    def look(self, seen: bytes, now: float) -> Literal["", "ask", "tell"]:
        """Return what to do now, by what is `seen` of rank 0: anything new in it is progress."""
        if seen != self._seen or now - self._last > _PAUSED_S:
            self._seen = seen
            self._due = now + self._notice_s
            self._knows = False
        self._last = now
        if now < self._due - (0.0 if self._knows else self._early_s):
            return ""
        if not self._knows:
            return "ask"
        self._due = math.inf  # until rank 0 goes on
        return "tell"

    def answer(self, waited_s: float, asked: float, now: float) -> None:
        """Note the longest wait of a rank when it was `asked`; 0 if none waits."""
        self._last = now
        self._due = asked + self._notice_s - waited_s
        self._knows = waited_s > 0 and self._due - now <= self._early_s


def longest_s(found: Mapping[str, Any]) -> float:
    """Return the seconds that a rank has waited for others, at most; `found` as for `explain`."""
    hosts = [of_host["ranks"] for of_host in found.values() if not isinstance(of_host, str)]
    # none are left of a rank that has just ended, and a zombie does not wait
    own = [processes[0] for ranks in hosts for processes in ranks.values() if processes]
    return max((each.get("waited", 0.0) for each in own), default=0.0)


def _watch(members: Sequence[tuple[str, int]], file: int, notice_s: float) -> None:
    patience = Patience(notice_s)
    told = set()  # causes, of which a second answer is one line
    while True:
        time.sleep(_EVERY_S)
        seen = os.pread(file, stacks.PLACE_BYTES, 0)
        asked = time.monotonic()
        todo = patience.look(seen, asked)
        if todo == "ask":
            # rank 0 may be on a host that cannot even start a program
            own_s = stacks.waited_s(stacks.place_in(seen))
            asked_ranks = list(members)
            job = os.environ.get("SLURM_JOB_ID", "")
            found = stacks.ask_all(asked_ranks, Path.cwd(), job)
            patience.answer(max(own_s, longest_s(found)), asked, time.monotonic())
        elif todo == "tell":
            lines = explain(asked_ranks, found)
            cause = kind_of(lines[0])
            if cause in told:
                del lines[1:]
            told.add(cause)
            show(f"{PROGRAM}: " + "\n".join(map(printable, lines)))


def main(file: int, notice_s: float) -> None:
    """Watch the ranks that are named on the standard input, until it ends."""
    outlive()
    child.ignore_signals()
    members = list[tuple[str, int]]()
    for line in sys.stdin:
        begins = not members
        members[:] = json.loads(line)
        if begins:
            threading.Thread(target=_watch, args=(members, file, notice_s), daemon=True).start()
    os._exit(0)  # an answer may be under way


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
