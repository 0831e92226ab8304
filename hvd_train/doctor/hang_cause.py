"""Who keeps a job from going on, and by what: decided from what was seen of each rank. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_train.doctor.hang_stacks import Frame, Thread, main_thread
from hvd_train.progress.clock import duration
from hvd_train.progress.whereabouts import Whereabouts

Kind = Literal[
    "nothing", "launcher", "stopped", "gone", "silent", "files", "loop", "lock", "waits", "computes", "skipped",
    "between", "unseen",
]  # fmt: skip
"""What a rank, or a job, does that does not go on: `waits` is for what is no lock, `computes` in code that is not the
user's, `between` all ranks wait in the same sum, `unseen` some rank could not be looked at."""

_BUSY = 0.2  # cores: a process that waits uses a hundredth of one
_OF_FILES = ("open", "read", "pread")
_NO_FILES = ("pipe:", "socket:", "anon_inode:")
_OPENS = re.compile(r"\b(?:open|imread|read_image|listdir|scandir|stat|load)\(")
_READS = re.compile(r"\.(?:read|readline|readlines|read_bytes|read_text|readinto)\(")
_LOCKS = re.compile(r"\bacquire\(|\bwith\s+[\w.]*lock|\block\b|\.wait\(|\.join\(|\.get\(", re.IGNORECASE)
_DOING = {
    "start": "it starts",
    "meeting": "the ranks meet",
    "data": "it waits for samples",
    "forward": "it is in the forward pass",
    "backward": "it is in the backward pass",
    "reduction": "it waits for gradients",
    "optimizer": "it updates the weights",
    "commit": "it copies its state for a commit",
    "other": "it is between two steps",
    "evaluation": "it evaluates",
    "end": "the training ends",
}
_MOST_RANKS = 6  # that a sentence names


@dataclass(frozen=True)
class Process:
    """What was seen of a process."""

    number: int
    name: str
    state: str
    """As the kernel has it: R runs, S sleeps, D waits for a device, T is stopped."""
    cpu: float
    """Cores that it used between two looks."""
    call: str = ""
    """The system call that it is in, where the kernel told it."""
    file: str = ""
    """The file that it reads in it."""
    kernel: str = ""
    """The function of the kernel that it waits in."""
    threads: tuple[Thread, ...] = ()
    """Empty where it did not answer."""
    native: str = ""
    """The stacks with native frames, where there are any."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in ("T", "t")


@dataclass(frozen=True)
class Rank:
    """What was seen of a rank."""

    number: int
    host: str
    process: Process | None
    """None where it has ended, or the host did not answer."""
    children: tuple[Process, ...] = ()
    """All processes that it has started, directly or not."""
    where: Whereabouts | None = None
    now: int = 0
    """When that was, by its host's time.monotonic_ns()."""
    moved: bool = False
    """Whether it went on between the looks."""
    silence: str = ""
    """Why the host did not answer; empty where it did."""
    out_of_reach: bool = False
    """Whether that is the network's doing: a host may also answer, and not let us in."""

    @property
    def named(self) -> str:
        """The rank with its host."""
        return f"rank {self.number} on {self.host}"

    @property
    def step(self) -> int:
        """The step that it is in; 0 where that is not known."""
        return self.where.step if self.where else 0

    @property
    def thread(self) -> Thread | None:
        """The thread that trains, where it has told its stack."""
        return main_thread(self.process.threads) if self.process else None

    @property
    def seconds(self) -> float:
        """How long it has been where it is."""
        if self.where is None:
            return 0.0
        return max(0.0, (self.now - max(self.where.phase_since, self.where.waits_since)) / 1e9)

    @property
    def waits_in(self) -> str:
        """In what it waits for other ranks, the same text for all that wait in the same; empty where it does not."""
        thread = self.thread
        if self.where is not None and self.where.waits_for:
            return f"{self.where.waits_for}{f' of step {self.step}' if self.step else ''}"
        if thread is not None and thread.in_horovod:
            frame = thread.their_frame
            return f"a collective at {frame.place}" if frame else "a collective"
        return ""


@dataclass(frozen=True)
class Culprit:
    """Who keeps the others waiting."""

    kind: Kind
    words: str
    """What it does, after `rank N on HOST`, or a whole sentence where it is no rank."""
    rank: int | None = None
    host: str = ""
    process: int | None = None
    place: str = ""
    """File and line of its code; empty where they are not known."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What keeps a job from going on."""

    sentence: str
    culprits: tuple[Culprit, ...] = ()
    """The most important one first."""

    @property
    def kind(self) -> Kind:
        """What the first culprit does."""
        return self.culprits[0].kind if self.culprits else "nothing"


@dataclass(frozen=True)
class Launcher:
    """The process that has started the ranks, or the driver of an elastic job."""

    name: str
    host: str
    number: int
    state: str


def explain(ranks: Sequence[Rank], launcher: Launcher | None, code: Mapping[str, str]) -> Answer:
    """Return who keeps the ranks from going on, the most certain cause first.

    `code` has lines of code that stacks name, each under `FILE:LINE`.
    """
    if launcher is not None and launcher.state in ("T", "t"):
        return _of_launcher(launcher, ranks)
    found = [one for one in map(_stopped, ranks) if one is not None]
    found = found or [_gone(rank) for rank in ranks if _is_gone(rank)]
    found = found or [_silent(rank) for rank in ranks if rank.out_of_reach]
    if not found and any(rank.moved for rank in ranks):
        return Answer(_goes_on(ranks))
    seen = [rank for rank in ranks if rank.process is not None]
    if not found:
        causes = [_cause(rank, code) for rank in seen if not rank.waits_in]
        found = sorted(causes, key=lambda one: (one.kind == "computes", -one.seconds))
    found = found or [_silent(rank) for rank in ranks if rank.silence]
    found = found or _skipped(seen)
    return Answer(_sentence(found, ranks), tuple(found))


def _of_launcher(launcher: Launcher, ranks: Sequence[Rank]) -> Answer:
    words = (
        f"the launcher on {launcher.host} ({launcher.name}, process {launcher.number}) is stopped (state "
        f"{launcher.state}, by SIGSTOP or a debugger): `kill -CONT {launcher.number}` there lets it go on"
    )
    gone = [rank.number for rank in ranks if _is_gone(rank)]
    after = f"; {_numbers(gone)} {'has' if len(gone) == 1 else 'have'} ended" if gone else ""
    stopped = tuple(one for one in map(_stopped, ranks) if one)
    return Answer(words + after, (Culprit("launcher", words, None, launcher.host, launcher.number), *stopped))


def _stopped(rank: Rank) -> Culprit | None:
    """Return what is stopped of a rank: its process, or one that it has started."""
    for process in (rank.process, *rank.children):
        if process is not None and process.is_stopped:
            own = process is rank.process
            what = f"(process {process.number})" if own else f"has a {_kind_of(process)} that"
            words = (
                f"{what} is stopped (state {process.state}, by SIGSTOP or a debugger)"
                f"{'' if own else f': process {process.number}'}; {_doing(rank)}; `kill -CONT {process.number}` there "
                "lets it go on"
            )
            return Culprit("stopped", words, rank.number, rank.host, process.number, "", rank.seconds)
    return None


def _is_gone(rank: Rank) -> bool:
    return rank.process is None and not rank.silence


def _gone(rank: Rank) -> Culprit:
    return Culprit("gone", "is gone: its process has ended", rank.number, rank.host)


def _silent(rank: Rank) -> Culprit:
    kind: Kind = "silent" if rank.out_of_reach else "unseen"
    words = "is out of reach: its host does not answer" if rank.out_of_reach else "cannot be looked at"
    return Culprit(kind, f"{words} ({rank.silence})", rank.number, rank.host)


def _cause(rank: Rank, code: Mapping[str, str]) -> Culprit:
    """Return why a rank that does not wait for the others does not go on."""
    assert rank.process is not None
    process, by = rank.process, ""
    if rank.where is not None and rank.where.phase in ("data", "evaluation", "start"):
        for child in rank.children:
            thread = main_thread(child.threads)
            if thread is not None and thread.calls("_utils/fetch.py"):  # it reads samples, and waits for no task
                process, by = child, f"its loader process {child.number} "
                break
    thread = main_thread(process.threads)
    frame = _frame(thread)
    kind, what = _what(process, thread, frame, code)
    place = frame.place if frame else ""
    where = f" ({place}, in {frame.function})" if frame else ""
    if by:
        words = f"has waited for samples of step {rank.step + 1} for {_time(rank)}: {by}has {what.rstrip(',')}{where}"
    else:
        words = f"has {what} for {_time(rank)}{where}; {_doing(rank)}"
    return Culprit(kind, words, rank.number, rank.host, process.number, place, rank.seconds)


def _what(process: Process, thread: Thread | None, frame: Frame | None, code: Mapping[str, str]) -> tuple[Kind, str]:
    """Return what a process does, as said after `has`."""
    line = code.get(f"{frame.file}:{frame.line}", "") if frame else ""
    of_files = process.call in _OF_FILES and not process.file.startswith(_NO_FILES)
    if of_files or process.state == "D" or "fifo" in process.kernel:
        call = "open" if process.call == "open" or _OPENS.search(line) else "read"
        of = f" of {process.file}" if process.file else ""
        return "files", f"been in {call}(){of}, which nothing answers,"
    if process.cpu > _BUSY:
        theirs = thread is not None and thread.their_frame is not None
        return ("loop" if theirs else "computes"), f"been computing on {process.cpu:.1f} cores, and come no further,"
    if not process.call and _OPENS.search(line):
        return "files", "been in open()"
    if not process.call and _READS.search(line):
        return "files", "been in a read"
    if process.call == "futex" or (not process.call and _LOCKS.search(line)):
        return "lock", "been waiting for a lock, or for another thread,"
    return "waits", f"been standing still{f' in {process.call}()' if process.call else ''}"


def _frame(thread: Thread | None) -> Frame | None:
    """Return the frame that tells most: the innermost one of the user's code, else of any but Python's own."""
    if thread is None or not thread.frames:
        return None
    return thread.their_frame or thread.frames[0]


def _skipped(ranks: Sequence[Rank]) -> list[Culprit]:
    """Return the ranks that wait in another collective than most, or the word that all wait in the same one."""
    counts = Counter(rank.waits_in for rank in ranks)
    if len(counts) < 2:
        longest = max((rank.seconds for rank in ranks), default=0.0)
        what = next(iter(counts), "a collective")
        words = (
            f"all ranks have waited in {what} for {duration(round(longest, 1))}, and none is missing there: look at "
            "the network between their hosts"
        )
        return [Culprit("between", words, seconds=longest)]

    def is_missing(rank: Rank) -> tuple[bool, int, int, int]:
        thread = rank.thread
        in_theirs = bool(rank.where and not rank.where.waits_for) or bool(thread and thread.their_frame)
        return in_theirs, counts[rank.waits_in], -rank.step, -rank.number

    # Whoever went past a collective is in a later one: of ours, while the others wait in one of the user's code.
    other = min(ranks, key=is_missing).waits_in
    missing = [rank for rank in ranks if rank.waits_in == other]
    waiting = [rank for rank in ranks if rank.waits_in != other]
    frame = _frame(waiting[0].thread)
    at = f" ({frame.place}, in {frame.function})" if frame and frame.place not in waiting[0].waits_in else ""
    found = []
    for rank in missing:
        words = (
            f"has not come to {waiting[0].waits_in}{at}: it waits in {rank.waits_in} instead, as where a program calls "
            "a collective on some ranks only"
        )
        place = frame.place if frame else ""
        found.append(Culprit("skipped", words, rank.number, rank.host, None, place, rank.seconds))
    return found


def _sentence(culprits: Sequence[Culprit], ranks: Sequence[Rank]) -> str:
    if not culprits:
        return "nothing was found"
    first = culprits[0]
    if first.rank is None:
        return first.words
    guilty = {one.rank for one in culprits}
    parts = [f"rank {first.rank} on {first.host} {first.words}"]
    others = [one for one in culprits[1:] if one.rank is not None]
    for same, what in ((True, "so it is with {}"), (False, "look at {}, too")):
        if numbers := [one.rank for one in others if one.rank is not None and (one.kind == first.kind) is same]:
            parts.append(what.format(_numbers(numbers)))
    waiting: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.number not in guilty and rank.waits_in:
            waiting.setdefault(rank.waits_in, []).append(rank.number)
    for what, numbers in waiting.items():
        parts.append(f"{_numbers(numbers)} {'waits' if len(numbers) == 1 else 'wait'} for it in {what}")
    return "; ".join(parts)


def _goes_on(ranks: Sequence[Rank]) -> str:
    step = max(rank.step for rank in ranks)
    slowest = max((rank for rank in ranks if not rank.waits_in), key=lambda rank: rank.seconds, default=None)
    more = f"; the longest without a sign is {slowest.named} ({duration(round(slowest.seconds, 1))})" if slowest else ""
    return f"nothing hangs: the ranks went on while they were looked at, in step {step}{more}"


def _doing(rank: Rank) -> str:
    """Return what a rank does in its training."""
    if rank.where is None:
        return "it keeps no record of where it is"
    if rank.where.waits_for:
        return f"it waits in {rank.waits_in}"
    step = rank.step + (rank.where.phase == "data")  # samples are those of the step to come
    return f"{_DOING[rank.where.phase]}{f' of step {step}' if step else ''}"


def _time(rank: Rank) -> str:
    return duration(round(rank.seconds, 1) if rank.seconds < 10 else round(rank.seconds))


def _kind_of(process: Process) -> str:
    return "loader process" if process.name.startswith("pt_data") else "child process"


def _numbers(numbers: Sequence[int]) -> str:
    """Return ranks as people write them: `ranks 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > _MOST_RANKS:
        shown = ", ".join(map(str, numbers[:_MOST_RANKS]))
        return f"ranks {shown} and {len(numbers) - _MOST_RANKS} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
