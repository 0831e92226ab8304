"""The program that `hvd-train why` runs on each host of a job, to see what the ranks there do.

It is sent there as text, so it imports only the standard library. It reads requests from standard input, a JSON object
a line, and answers each with a line of JSON; it ends when its input ends. It looks into no file outside of /proc, but
for the lines of code that stacks name: a file system may be what hangs.
"""

from __future__ import annotations

import fcntl
import json
import linecache
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_ASKED = signal.SIGRTMAX - 6  # as in launch.stacks, which has the names of the files as well
_RECORD, _STACKS = "/memfd:hvd_train-record (deleted)", "/memfd:hvd_train-stacks (deleted)"
_BETWEEN_LOOKS_S = 1.0
_DUMP_S, _QUIET_S, _POLL_S = 2.0, 0.05, 0.01  # how long stacks may take; they are whole when nothing more comes
_LINES_S = 0.5
_NATIVE_S = 6.0
_MOST_BYTES = 2**20
_MOST_CHILDREN = 64  # of a rank
_CALLS = {
    "x86_64": {0: "read", 2: "open", 17: "pread", 7: "poll", 202: "futex", 257: "open", 61: "wait", 232: "epoll"},
    "aarch64": {63: "read", 56: "open", 67: "pread", 73: "poll", 98: "futex", 260: "wait", 22: "epoll"},
}.get(platform.machine(), {})


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Return what processes do: those of request["ranks"], of request["launcher"], and all that the ranks started.

    A process is {"number", "started"}. Each is looked at twice, a second apart.
    """
    tree = _tree()
    ranks = {str(rank): _family(process, tree) for rank, process in request["ranks"].items()}
    launcher = request.get("launcher")
    family = {number for numbers in ranks.values() for number in numbers}
    begun, before = time.monotonic(), {number: _seen(number) for number in family}
    host = {"network": _network()}
    time.sleep(_BETWEEN_LOOKS_S)
    after = {number: _seen(number) for number in family}
    seconds = time.monotonic() - begun
    stacks = _stacks(after)
    processes = {}
    for number, now in after.items():
        if now is not None:
            earlier = before.get(number) or now
            cpu = (now["ticks"] - earlier["ticks"]) / os.sysconf("SC_CLK_TCK") / seconds
            moved = earlier["record"] != now["record"]
            processes[number] = {**now, "cpu": cpu, "moved": moved, "stacks": stacks.get(number, "")}
    return {
        "now": time.monotonic_ns(),
        "ranks": {
            rank: [processes[number] for number in numbers if number in processes] for rank, numbers in ranks.items()
        },
        "launcher": None if launcher is None else _seen_if_same(launcher),
        "lines": _lines(stacks.values()),
        "host": {**_host(), "network": _since(host["network"], _network())},
    }


def native(request: dict[str, Any]) -> dict[str, Any]:
    """Return the stack of a process with the frames of native code, by py-spy where it is installed and allowed."""
    beside = os.path.dirname(sys.executable)
    program = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        return {"text": ""}
    command = [program, "dump", "--native", "--pid", str(request["number"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_NATIVE_S)
    except (OSError, subprocess.TimeoutExpired):
        return {"text": ""}
    return {"text": done.stdout if done.returncode == 0 else ""}


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"look": look, "native": native}[request["do"]](request)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with this host is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _stat(number: int) -> list[str]:
    """Return the name of a process and the fields of its stat from the state on. Raises OSError where it is gone."""
    with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as file:
        text = file.read()
    return [text[text.index("(") + 1 : text.rindex(")")], *text.rpartition(")")[2].split()]


def _tree() -> dict[int, list[int]]:
    """Return the children of each process of this host."""
    tree: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                tree.setdefault(int(_stat(int(name))[2]), []).append(int(name))
    return tree


def _family(process: dict[str, int], tree: dict[int, list[int]]) -> list[int]:
    """Return a process, if it is still the same one, and all below it."""
    number = process["number"]
    if _seen_if_same(process) is None:
        return []
    found = [number]
    for one in found:
        found += tree.get(one, [])
        if len(found) > _MOST_CHILDREN:
            break
    return found[: _MOST_CHILDREN + 1]


def _seen_if_same(process: dict[str, int]) -> dict[str, Any] | None:
    seen = _seen(process["number"])
    return seen if seen is not None and seen["started"] == process["started"] else None


def _seen(number: int) -> dict[str, Any] | None:
    """Return what is known of a process without its help; None where it has ended."""
    try:
        name, state, parent, *fields = _stat(number)
    except (OSError, ValueError):
        return None
    if state in "ZX":
        return None
    return {
        "number": number,
        "parent": int(parent),
        "name": name,
        "state": state,
        "started": int(fields[17]),
        "ticks": int(fields[9]) + int(fields[10]),
        "kernel": _text(f"/proc/{number}/wchan").strip("0\n"),
        "call": _call(number),
        "record": _record(number),
    }


def _call(number: int) -> list[str]:
    """Return the system call that a process is in, and the file that it reads, as far as the kernel tells us."""
    words = _text(f"/proc/{number}/syscall").split()
    if not words or not words[0].isdigit():
        return ["", ""]
    name = _CALLS.get(int(words[0]), f"system call {words[0]}")
    file = ""
    if name in ("read", "pread") and len(words) > 1:
        with suppress(OSError, ValueError):
            file = os.readlink(f"/proc/{number}/fd/{int(words[1], 16)}")
    return [name, file]


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""


def _in_memory(number: int, name: str) -> str | None:
    """Return a path by which a file in the memory of a process can be opened."""
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{number}/fd"):
            path = f"/proc/{number}/fd/{entry}"
            with suppress(OSError):
                if os.readlink(path) == name:
                    return path
    return None


def _record(number: int) -> str:
    path = _in_memory(number, _RECORD)
    if path is not None:
        with suppress(OSError), open(path, "rb") as file:
            return file.read(4096).hex()
    return ""


def _stacks(processes: dict[int, Any]) -> dict[int, str]:
    """Ask processes for their stacks, and return what they say; those that are stopped, or do not answer, say nothing.

    A process that was forked from another one has the same file: one of the two is asked.
    """
    files: dict[int, int] = {}
    asked: dict[int, int] = {}
    try:
        for number, seen in processes.items():
            path = _in_memory(number, _STACKS) if seen is not None and seen["state"] not in "TtD" else None
            if path is None or not _answers(number):
                continue
            with suppress(OSError):
                file = os.open(path, os.O_RDWR)
                files[number] = file
                inode = os.fstat(file).st_ino
                if inode in asked.values():
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # somebody else may ask at this moment
                os.ftruncate(file, 0)
                os.kill(number, _ASKED)
                asked[number] = inode
        return _read({number: files[number] for number in asked})
    finally:
        for file in files.values():
            os.close(file)


def _answers(number: int) -> bool:
    """Return whether a process has a handler for our signal, which would end it otherwise."""
    for line in _text(f"/proc/{number}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (_ASKED - 1) & 1)
    return False


def _read(files: dict[int, int]) -> dict[int, str]:
    deadline = time.monotonic() + _DUMP_S
    sizes = dict.fromkeys(files, 0)
    grown = dict.fromkeys(files, time.monotonic())
    found: dict[int, str] = {}
    while len(found) < len(files) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for number, file in files.items():
            size = os.fstat(file).st_size
            if size != sizes[number]:
                sizes[number], grown[number] = size, time.monotonic()
            elif size and number not in found and time.monotonic() - grown[number] > _QUIET_S:
                found[number] = os.pread(file, _MOST_BYTES, 0).decode(errors="replace")
    return found


def _lines(stacks: Iterable[str]) -> dict[str, str]:
    """Return the lines of code that stacks name, by `FILE:LINE`, as far as they come at once."""
    found: dict[str, str] = {}
    places = {place for text in stacks for place in re.findall(r'^  File "([^"\n]+)", line (\d+) in ', text, re.M)}

    def read() -> None:
        for file, line in sorted(places):
            found[f"{file}:{line}"] = linecache.getline(file, int(line)).strip()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(_LINES_S)
    return dict(found)


def _host() -> dict[str, Any]:
    memory = dict(re.findall(r"^(\w+):\s+(\d+)", _text("/proc/meminfo"), re.M))
    total = int(memory.get("MemTotal", 0)) * 1024
    free = int(memory.get("MemAvailable", 0)) * 1024
    pressure = {}
    for name in ("cpu", "io", "memory"):
        match = re.search(r"some avg10=([\d.]+)", _text(f"/proc/pressure/{name}"))
        if match:
            pressure[name] = float(match[1])
    return {"load": os.getloadavg()[0], "cores": os.cpu_count(), "memory": [total, free], "pressure": pressure}


def _network() -> dict[str, int]:
    """Return the bytes that have come and gone, and the segments that had to be sent again."""
    counts = {"received": 0, "sent": 0, "again": 0}
    for line in _text("/proc/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() != "lo" and len(fields) > 8:
            counts["received"] += int(fields[0])
            counts["sent"] += int(fields[8])
    lines = [line.split() for line in _text("/proc/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2 and "RetransSegs" in lines[0]:
        counts["again"] = int(lines[1][lines[0].index("RetransSegs")])
    return counts


def _since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


if __name__ == "__main__":
    main()
