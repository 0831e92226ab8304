"""Show where the processes of a rank are: their step, Python stacks and states. No torch.

    python -m hvd_train.launch.stacks FOLDER PID...    look at these ranks of this host

Each rank and loader process has a file in memory, which ends with it: first its place, then what
`faulthandler` writes: at SIGUSR2 the main thread, also while C code holds the interpreter's lock;
for a byte in a pipe all threads, by a thread that gets the lock first, since to look at threads
that run would crash the process. Another process of the same user opens both in /proc.
"""

import faulthandler
import json
import mmap
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_train.launch import launcher, ssh
from hvd_train.launch.child import output_of, why_failed
from hvd_train.launch.start import program

if TYPE_CHECKING:
    import psutil

_NAME = "hvd_train-stacks"
# of a place, which comes before the stacks; times are seconds of the monotonic clock
_FIELDS = ("process", "step", "waits_since", "began", "answers", "what", "pipe", "main_thread")
_PLACE = struct.Struct("=qqdd?64siQ")
PLACE_BYTES = _PLACE.size
_WAITS_SINCE = struct.Struct("=d")
_WAITS_AT = 16
STARTS = "the start before step"
_BETWEEN_S = 2.0  # from the first look at a step to the second
_STACK_S = 3.0
_THREADS_S = 1.0  # longer means that another thread keeps the lock
_HOST_S = 10.0
# A step of a job: beside its ranks, without a wait for resources or their MPI.
_SRUN = (
    "srun --overlap --immediate=5 --nodes 1 --ntasks 1 --cpus-per-task 1 --mem 0 --gres none "
    "--cpu-bind none --mpi none --input none --time 1 --quiet"
)
_THREAD = re.compile(r"^Thread 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*\n)+)", re.MULTILINE)
_BATCHES = "/dev/shm"  # noqa: S108  # where loader processes put their batches

# of this process, once it is registered
_files = list[int]()
_places = list[mmap.mmap]()
_threads = list[int]()  # the end of the pipe to write to, and the main thread


def register() -> None:
    """Let other processes of this user see the stacks of this one, unless it handles SIGUSR2."""
    if _files or not hasattr(os, "memfd_create"):
        return
    file = os.memfd_create(_NAME)
    os.ftruncate(file, PLACE_BYTES)
    os.lseek(file, PLACE_BYTES, os.SEEK_SET)
    _files.append(file)
    _places.append(mmap.mmap(file, PLACE_BYTES))
    asked, pipe = os.pipe()
    _threads[:] = pipe, threading.main_thread().ident or 0
    threading.Thread(target=_show_threads, args=(asked, file), daemon=True, name="stacks").start()
    begin(1, STARTS)
    if _is_free():
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False, chain=False)


def _show_threads(asked: int, file: int) -> None:
    while os.read(asked, 1):
        faulthandler.dump_traceback(file, all_threads=True)


def file() -> int | None:
    """Return the file of this process, if it is registered."""
    return _files[0] if _files else None


def register_rank() -> None:
    """Register this process if a launcher started it: its program may hang before it trains."""
    if launcher.launched(os.environ):
        register()


def begin(step: int, what: str = "step") -> None:
    """Note that this rank begins a step, or `what` comes before the number of the step."""
    for place in _places:
        now = time.monotonic()
        fields = os.getpid(), step, 0.0, now, _is_free(), what.encode(), *_threads
        _PLACE.pack_into(place, 0, *fields)


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


def ask_all(members: Sequence[tuple[str, int]], folder: Path, job: str = "") -> dict[str, Any]:
    """Return what `ask` does for each host of these ranks, which are hosts and processes."""
    processes = defaultdict[str, list[int]](list)
    for host, process in members:
        processes[host].append(process)
    with ThreadPoolExecutor(len(processes)) as threads:
        found = threads.map(partial(ask, folder=folder, job=job), processes, processes.values())
        return dict(zip(processes, found, strict=True))


def ask(host: str, processes: Sequence[int], folder: Path, job: str = "") -> Any:
    """Return what `look` finds on a host, or why it is unknown.

    Another host is reached by srun if its ranks are in this job of Slurm, else over ssh.
    """
    words = [program("python"), "-m", "hvd_train.launch.stacks", str(folder)]
    words = ssh.with_our_path([*words, *map(str, processes)])
    if is_here(host, processes):
        command = words
    elif job and shutil.which("srun"):
        command = [*_SRUN.split(), "--jobid", job, "--nodelist", host, *words]
    else:
        command = ssh.command(host, words)
    try:
        done = output_of(command, timeout=_HOST_S, env=_without_settings_of_srun())
        return json.loads(done.stdout[done.stdout.index("{") :])
    except subprocess.TimeoutExpired:
        return f"no answer within {_HOST_S:.0f} s"
    except OSError as error:  # there is no ssh
        return str(error)
    except ValueError:
        return why_failed(done)


def _without_settings_of_srun() -> dict[str, str]:
    """Return this environment; in a job, srun would take the job's settings from it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("SLURM_CONF") or not name.startswith(("SLURM_", "SRUN_"))
    }


def is_here(host: str, processes: Sequence[int]) -> bool:
    """Return whether this host, or a rank here by one of these processes, has this name."""
    return ssh.is_here(host) or any(
        place_of(process) and launcher.host_name(_environment(process)) == host
        for process in processes
    )


def ranks_that_start() -> dict[int, int]:
    """Return the number of each rank that was started in this folder and has not begun to train,
    by its process.
    """
    import psutil

    found = [process for process in psutil.process_iter() if place_of(process.pid)]
    ranks = {}
    for process in found:
        with suppress(psutil.Error, OSError, TypeError):  # it has ended meanwhile
            starts = place_of(process.pid)["what"] == STARTS and process.cwd() == os.getcwd()
            if starts and not {*found}.intersection(process.parents()):
                launch = launcher.launched(_environment(process.pid))
                ranks[process.pid] = launch.rank if launch else 0
    return ranks


def _environment(process: int) -> dict[str, str]:
    """Return the variables with which a process began; none if it has ended."""
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(process).environ()
    return {}


def look(folder: Path, processes: Sequence[int]) -> dict[str, Any]:
    """Return the processes of each rank that runs, its own first, and what this host has left."""
    import psutil

    before = {process: place_of(process) for process in processes}
    waited = {process: waited_s(place) for process, place in before.items() if place}
    time.sleep(_BETWEEN_S)
    ranks = {}
    with ThreadPoolExecutor() as threads:
        for process, place in before.items():
            with suppress(psutil.Error):  # it has ended meanwhile
                own = psutil.Process(process)
                if place is None and own.status() != psutil.STATUS_ZOMBIE:
                    continue  # another program has its number
                family = threads.map(_seen, [own, *own.children(recursive=True)])
                earlier = {"before": place["step"], "waited": waited[process]} if place else {}
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
        state = process.status()
        place = place_of(process.pid)
        if place is None:  # a program that the user's code has started, or a zombie
            nothing = {"stack": "", "threads": []}
            return {"process": process.pid, "name": process.name(), "state": state, **nothing}
        stack = ""
        threads = {}
        if state != psutil.STATUS_STOPPED:
            stack = _stack(process.pid) if place["answers"] else ""
            threads = _threads_of(process.pid, place["pipe"])
        main = threads.pop(place["main_thread"], "")
        return {
            **place,
            "state": state,
            "seconds": time.monotonic() - place["began"],
            "stack": stack or main,
            "threads": [*threads.values()],
            "unconfirmed": _unconfirmed(process.pid),
        }
    return None


def _unconfirmed(process: int) -> list[str]:
    """Return the IPv4 addresses that do not confirm what a process has sent them, again and again.

    Raises OSError if it has ended.
    """
    own = {os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()}
    found = set()
    for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        unanswered = int(words[6], 16) + int(words[8])  # retransmissions and probes
        if unanswered and f"socket:[{words[9]}]" in own:
            address = bytes.fromhex(words[2].partition(":")[0])
            found.add(socket.inet_ntoa(address if sys.byteorder == "big" else address[::-1]))
    return sorted(found)


def _stack(process: int) -> str:
    """Let a process write the stack of its main thread, and return it; empty if it does not within
    some seconds.
    """
    # the process may be about to start a program, which the signal would end
    if not _catches_signal(process):
        return ""
    return _written(process, lambda: os.kill(process, signal.SIGUSR2), _STACK_S)


def _threads_of(process: int, pipe: int) -> dict[int, str]:
    """Return the stacks of a process by thread, without the one that writes them; none if it does
    not get the interpreter's lock.
    """

    def ask() -> None:
        with open(f"/proc/{process}/fd/{pipe}", "wb", buffering=0) as end:
            end.write(b".")

    written = _written(process, ask, _THREADS_S)
    return {int(number, 16): text for number, text in _THREAD.findall(written)}


def _written(process: int, ask: Callable[[], None], limit_s: float) -> str:
    """Return what a process writes into its file when asked. Raises OSError if it has ended."""
    file = _file(process)
    if file is None:
        return ""
    with open(file, "rb") as opened:
        start = size = max(os.fstat(opened.fileno()).st_size, PLACE_BYTES)
        ask()
        deadline = time.monotonic() + limit_s
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
