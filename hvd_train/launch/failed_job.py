"""How a job that failed ends, in words: which rank failed first, what its exit code means, what to type. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_train.console import PROGRAM
from hvd_train.errors import RankLost, UsageError
from hvd_train.launch.memory_kills import ASK_KERNEL, Watch
from hvd_train.launch.printed import Printed

SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGTERM = (128 + number for number in (6, 7, 9, 11, 15))
SSH_FAILED = 255  # the exit code of ssh where it, not the command that it runs, has failed
STOPPED = (75, 129, 130, 138, SIGTERM)  # a commit before the end, on a signal or because the time was up
_BY_LAUNCHER = (SIGTERM, SIGKILL, SSH_FAILED)  # how the launcher ends the ranks that are left, or ssh to them

_OF_HVD_TRAIN = {  # which tells a line before it ends with one of these
    3: "that another rank was lost",
    4: "that ranks held different states",
    5: "that the same step or start failed again and again",
    6: "that the loss is no longer finite",
    7: "that all ranks with a whole state were lost",
    8: "that memory did not suffice",
    9: "that its host was wrong again and again",
    69: "that an elastic job found too few workers",
    74: "that the last files could not be written",
}
_OF_OTHERS = {
    126: "the program cannot be run on that host",
    127: "there is no such program on that host",
    132: "native code was built for another processor",
    SIGABRT: "native code has ended itself, as after a check that failed",
    SIGBUS: "memory had no room behind it: /dev/shm or a disk is full (df -h /dev/shm), or a mapped file was cut short",
    136: "native code has divided by zero",
    SIGSEGV: "native code has used memory that is not its own",
    SSH_FAILED: "the ssh to that host has failed, or a signal has ended the process there",
}


@dataclass(frozen=True)
class End:
    """How one rank has ended."""

    rank: int
    host: str
    exit_code: int
    """As shells have it: 128 + N for signal N."""
    printed: Printed = field(default_factory=Printed, compare=False)


def first(ends: Sequence[End]) -> End | None:
    """Return the rank that failed first, of `ends` in the order in which ranks ended; None where none failed.

    A rank that ends since another one is lost may be faster than that one, which may still write a core dump.
    """
    failed = [end for end in ends if end.exit_code]
    by_itself = [end for end in failed if end.exit_code not in (RankLost.exit_code, *_BY_LAUNCHER)]
    if failed and failed[0].exit_code == RankLost.exit_code and by_itself:
        return by_itself[0]
    return failed[0] if failed else None


def meaning(exit_code: int, printed: Printed, watch: Watch | None, host: str) -> str:
    """Return what an exit code means, in a few words, with all that is known of this end; empty where that is nothing.

    `watch` is that of this host, where the process was on it, else None: then it was on `host`.
    """
    if exit_code in _OF_HVD_TRAIN:
        told = f"hvd_train has not told {_OF_HVD_TRAIN[exit_code]}, for which it has this code"
        return f"its program has ended itself, as by sys.exit({exit_code}): {told}"
    if exit_code == SIGKILL and watch is None:
        return f'killed from outside, most likely for want of memory; what the kernel says: ssh {host} "{ASK_KERNEL}"'
    if exit_code == SIGKILL and watch is not None:
        return f"killed {watch.who_has_killed()}"
    where = f"at {printed.crashed_at}" if exit_code > 128 and printed.crashed_at else ""
    return ", ".join(filter(None, (_OF_OTHERS.get(exit_code), where)))


def summary(end: End, watch: Watch | None, command: Sequence[str], others: Iterable[Printed] = ()) -> list[str]:
    """Return the lines that say why the job has failed with `end`, below the one that names the rank and its exit code.

    They leave out what the ranks have told themselves, right above. None are needed for wrong input, a stop after a
    commit, or an error that hvd_train has told. `watch` is as in `meaning`; `command` is what the user has typed.
    """
    printed, code = end.printed, end.exit_code
    if code in (UsageError.exit_code, *STOPPED) or (code <= 128 and printed.told):
        return []
    lines = []
    above = printed.came_last()
    why = printed.error if code == 1 and not above else meaning(code, printed, watch, end.host)
    if why:
        lines.append(f"why: {why}")
    if printed.last and not above:
        first_line, *more = printed.last
        lines += [f"it printed last: {first_line}", *(f"                 {line}" for line in more)]
    if "train" in command and PROGRAM in (Path(word).name for word in command):
        folder = value_of("--log-dir", command)
        kept = f"in {Path(folder, f'rank-{end.rank}.log')} on {end.host}" if folder else "--log-dir logs keeps it"
        lines.append(f"its whole output: {kept}")
        if value_of("--resume", command) == "never":
            lines.append("next: the same command without --resume never goes on from the last commit")
        elif not any(other.goes_on for other in others):
            lines.append("next: the same command goes on from the last commit")
    return [f"  {line}" for line in lines]


def value_of(flag: str, command: Sequence[str]) -> str | None:
    """Return the value of a flag in a command line, or None where it is not there."""
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(command[number + 1 :]), None)
    return None
