"""Show where the processes of a rank are: their step, Python stacks and states. No torch.

    python -m hvd_train.launch.stacks FOLDER PID...    look at these ranks of this host

Each rank and loader process has a file in memory, which ends with it: first its place, then what
`faulthandler` writes at SIGUSR2, also while C code holds the interpreter's lock. Another process of
the same user opens it in /proc.
"""

import faulthandler
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_train.launch import ssh
from hvd_train.launch.start import program

if TYPE_CHECKING:
    import psutil

_NAME = "hvd_train-stacks"
# of a place, which comes before the stacks; times are seconds of the monotonic clock
_FIELDS = ("process", "step", "waits_since", "began", "answers", "what")
_PLACE = struct.Struct("=qqdd?64s")
PLACE_BYTES = _PLACE.size
_WAITS_SINCE = struct.Struct("=d")
_WAITS_AT = 16
_BETWEEN_S = 2.0  # from the first look at a step to the second
_STACK_S = 3.0
_HOST_S = 10.0
_BATCHES = "/dev/shm"  # noqa: S108  # where loader processes put their batches

# of this process, once it is registered
_files = list[int]()
_places = list[mmap.mmap]()


def register() -> None:
    """Let other processes of this user see the stacks of this one, unless it handles SIGUSR2."""
    if _files or not hasattr(os, "memfd_create"):
        return
    file = os.memfd_create(_NAME)
    os.ftruncate(file, PLACE_BYTES)
    os.lseek(file, PLACE_BYTES, os.SEEK_SET)
    _files.append(file)
    _places.append(mmap.mmap(file, PLACE_BYTES))
    begin(1, "the start before step")
    if _is_free():
        # To look at other threads while they run would crash the process now and then.
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False, chain=False)


def file() -> int | None:
    """Return the file of this process, if it is registered."""
    return _files[0] if _files else None


def begin(step: int, what: str = "step") -> None:
    """Note that this rank begins a step, or `what` comes before the number of the step."""
    for place in _places:
        now = time.monotonic()
        _PLACE.pack_into(place, 0, os.getpid(), step, 0.0, now, _is_free(), what.encode())


class _Waiting:
    """Notes that this rank waits for other ranks inside a block; cheaper than a generator."""

    def __enter__(self) -> None:
        for place in _places:
            _WAITS_SINCE.pack_into(place, _WAITS_AT, time.monotonic())

    def __exit__(self, *_: object) -> None:
        for place in _places:
            _WAITS_SINCE.pack_into(place, _WAITS_AT, 0.0)


waiting = _Waiting()


def _is_free() -> bool:
    """Return whether no code of Python handles the signal: the user's may do so later."""
    return signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def ask_all(members: Sequence[tuple[str, int]], folder: Path) -> dict[str, Any]:
    """Return what `ask` does for each host of these ranks, which are hosts and processes."""
    processes = defaultdict[str, list[int]](list)
    for host, process in members:
        processes[host].append(process)
    with ThreadPoolExecutor(len(processes)) as threads:
        found = threads.map(partial(ask, folder=folder), processes, processes.values())
        return dict(zip(processes, found, strict=True))


def ask(host: str, processes: Sequence[int], folder: Path) -> Any:
    """Return what `look` finds on a host, over ssh unless it is this one, or why it is unknown."""
    words = [program("python"), "-m", "hvd_train.launch.stacks", str(folder)]
    command = ssh.command(host, ssh.with_our_path([*words, *map(str, processes)]))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HOST_S,
        )
        return json.loads(done.stdout[done.stdout.index("{") :])
    except subprocess.TimeoutExpired:
        return f"no answer within {_HOST_S:.0f} s"
    except OSError as error:  # there is no ssh
        return str(error)
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def look(folder: Path, processes: Sequence[int]) -> dict[str, Any]:
    """Return the processes of each rank that runs, its own first, and what this host has left."""
    import psutil

    before = {process: place for process in processes if (place := place_of(process))}
    waited = {process: waited_s(place) for process, place in before.items()}
    time.sleep(_BETWEEN_S)
    ranks = dict[int, list[dict[str, Any]]]()
    with ThreadPoolExecutor() as threads:
        for process, place in before.items():
            with suppress(psutil.Error):  # it has ended meanwhile
                own = psutil.Process(process)
                family = threads.map(_seen, [own, *own.children(recursive=True)])
                earlier = {"before": place["step"], "waited": waited[process]}
                ranks[process] = [{**each, **earlier} for each in family if each]
    memory = psutil.virtual_memory().available / 2**30
    disks = (
        f", {shutil.disk_usage(path).free / 2**30:.1f} GiB free in {path}"
        for path in (_BATCHES, folder)
        if os.path.exists(path)
    )
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return {"ranks": ranks, "host": f"{load}, {memory:.1f} GiB of memory free{''.join(disks)}"}


def place_of(process: int) -> Any:
    """Return the place of a process, if it is a rank or loader process of this user and host."""
    file = _file(process)
    with suppress(OSError, struct.error):  # it has ended, or is about to write
        place = place_in(file.read_bytes()) if file else {}
        # a process that was forked has the file of its parent
        return place if place.get("process") == process else None
    return None


def place_in(text: bytes) -> dict[str, Any]:
    """Return the place in the file of a process. Raises struct.error if there is none yet."""
    place = dict(zip(_FIELDS, _PLACE.unpack_from(text), strict=True))
    return {**place, "what": place["what"].rstrip(b"\0").decode()}


def waited_s(place: Mapping[str, Any]) -> float:
    """Return for how many seconds a rank of this host has waited for others; 0 if it does not."""
    return time.monotonic() - place["waits_since"] if place["waits_since"] else 0.0


def _file(process: int) -> Path | None:
    with suppress(OSError):  # it has ended, or is another user's
        for entry in Path(f"/proc/{process}/fd").iterdir():
            if os.readlink(entry).startswith(f"/memfd:{_NAME} "):
                return entry if entry.lstat().st_uid == os.getuid() else None
    return None


def _seen(process: "psutil.Process") -> dict[str, Any] | None:
    import psutil

    with suppress(psutil.Error, OSError):
        if place := place_of(process.pid):
            state = process.status()
            answers = place["answers"] and state != psutil.STATUS_STOPPED
            return {
                **place,
                "state": state,
                "seconds": time.monotonic() - place["began"],
                "stacks": _stacks(process.pid) if answers else "",
            }
    return None


def _stacks(process: int) -> str:
    """Let a process write its stacks, and return them; empty if it does not within some seconds."""
    file = _file(process)
    # the process may be about to start a program, which the signal would end
    if file is None or not _catches_signal(process):
        return ""
    with open(file, "rb") as opened:
        start = size = max(os.fstat(opened.fileno()).st_size, PLACE_BYTES)
        os.kill(process, signal.SIGUSR2)
        deadline = time.monotonic() + _STACK_S
        before = 0
        while time.monotonic() < deadline and not start < before == size:
            time.sleep(0.05)
            before = size
            size = os.fstat(opened.fileno()).st_size
        opened.seek(start)
        return opened.read().decode(errors="replace")


def _catches_signal(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])))
