"""Questions put to child processes, so that a crash, a hang or a missing library there is an answer here.

Whatever a command starts, be it in sessions of its own as horovodrun's workers are, ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from hvd_train.launch import processes

ANSWER = "hvd-train doctor: "
_MARK = "HVD_TRAIN_DOCTOR"
_GRACE_S = 3.0
_RANK_LIMIT_S = 90  # a rank ends itself after this, should even the doctor have been killed

# `python -c` puts the current folder first on the path, where an unpacked Horovod may lie. `tell` writes at once and
# as one piece: launchers mix the output of ranks.
_PRELUDE = f"""
import json, os, signal, sys, warnings
sys.path = [folder for folder in sys.path if folder]
signal.alarm({_RANK_LIMIT_S})
def tell(facts):
    sys.stdout.flush()
    os.write(1, ("\\n{ANSWER}" + json.dumps(facts) + "\\n").encode())
def trouble(error):
    while error.__cause__:
        error = error.__cause__
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
"""

TORCH = (
    _PRELUDE
    + """
try:
    import torch
except Exception as error:
    tell({"error": trouble(error)})
    sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    available = torch.cuda.is_available()
facts["gpu_trouble"] = str(caught[0].message).splitlines()[0] if caught else ""
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if available else 0)]
facts["gpus"] = [[device.name, device.total_memory] for device in devices]
try:
    facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
except Exception:
    facts["nccl"] = None
tell(facts)  # should torchvision crash, this has been said
try:
    import torchvision
    facts["torchvision"] = torchvision.__version__
except Exception as error:
    facts["torchvision_error"] = trouble(error)
tell(facts)
try:
    from hvd_train.data import pictures
    facts["jpeg_parts"] = pictures.region_library() is not None
except Exception as error:
    facts["jpeg_parts_error"] = trouble(error)
tell(facts)
"""
)

HOROVOD = (
    _PRELUDE
    + """
try:
    import horovod.torch as hvd
    if not hasattr(hvd, "init"):  # the release prints the reason and goes on
        raise ImportError("horovod.torch has no extension module for this Python")
except Exception as error:
    tell({"error": trouble(error)})
    sys.exit()
import ctypes
facts = {"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built()), "libmpi": ""}
with open("/proc/self/maps") as maps:
    loaded = {line.split(None, 5)[5].strip() for line in maps if "/libmpi.so" in line}
for path in loaded:
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(path).MPI_Get_library_version(text, ctypes.byref(length))
    facts["libmpi"] = text.value.decode(errors="replace")
tell(facts)
"""
)

MPI4PY = (
    _PRELUDE
    + """
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    tell({"version": mpi4py.__version__, "libmpi": MPI.Get_library_version()})
except Exception as error:
    tell({"error": trouble(error)})
"""
)

# A megabyte, so that the transport is used and not only the handshake.
ALLREDUCE = (
    _PRELUDE
    + """
device = sys.argv[1]
import torch
import horovod.torch as hvd
hvd.init()
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank())
total = hvd.allreduce(torch.full((262144,), hvd.rank() + 1.0, device=device), op=hvd.Sum, name="doctor")
if hvd.rank() == 0:
    sums = total.unique().tolist()
    tell({"size": hvd.size(), "sums": sums[:4], "controller": "Gloo" if hvd.gloo_enabled() else "MPI"})
hvd.shutdown()
"""
)


# From 1 KB to 64 MB: the shortest of a few, since what disturbs only adds.
BANDWIDTH = (
    _PRELUDE
    + """
import time
import torch
import horovod.torch as hvd
hvd.init()
times = []
for count in (2**10, 2**14, 2**18, 2**20, 2**23, 2**26):
    values, best = torch.ones(count // 4), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        hvd.allreduce_(values, op=hvd.Average, name=f"doctor.{count}")
        best = min(best, time.perf_counter() - started)
    times.append([count, best])
if hvd.rank() == 0:
    tell({"size": hvd.size(), "times": times})
hvd.shutdown()
"""
)


@dataclass(frozen=True)
class Ran:
    """What became of a command. `code` is None where it did not end in time, negative for a signal."""

    code: int | None
    output: str
    seconds: float = 0.0


class Command:
    """A command under way, with its output going to a file: no pipe that a left process could hold open."""

    def __init__(self, words: list[str], environ: Mapping[str, str], timeout_s: float) -> None:
        self.mark = environ[_MARK]
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # it is open as long as this object
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = subprocess.Popen(
                words,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self.output.write(f"{type(error).__name__}: {error}".encode())

    def result(self) -> Ran:
        """Wait for the end, or make one when the time is up."""
        code: int | None = 127
        if self.process is not None:
            try:
                code = self.process.wait(max(0.0, self.started + self.timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
        seconds = time.monotonic() - self.started
        end([self])
        self.output.seek(0)
        return Ran(code, self.output.read().decode(errors="replace"), seconds)


class Commands:
    """Starts commands, and ends them with all that they started."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._folder = tempfile.TemporaryDirectory(prefix="hvd-doctor-")  # MPI leaves files in its TMPDIR
        self._environ = {**environ, "TMPDIR": self._folder.name}
        self._started: list[Command] = []

    def start(self, words: list[str | Path], timeout_s: float) -> Command:
        """Start a command; it has this long from now on."""
        environ = {**self._environ, _MARK: f"{self._mark}.{len(self._started)}."}
        self._started.append(Command([str(word) for word in words], environ, timeout_s))
        return self._started[-1]

    def end(self) -> None:
        """End all of them, and all that they started."""
        try:
            end([command for command in self._started if command.process and command.process.poll() is None])
        finally:
            _kill_marked(self._mark)
            self._folder.cleanup()


@contextmanager
def commands(environ: Mapping[str, str]) -> Iterator[Commands]:
    """A block to start commands in; when it ends, for whatever reason, they are gone."""
    group = Commands(environ)
    try:
        yield group
    finally:
        group.end()


def end(commands: list[Command]) -> None:
    """Ask commands to end and give launchers a moment to tidy up; then kill what is left of them."""
    running = [c.process for c in commands if c.process is not None and c.process.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for command in commands:
        # Python's resource tracker outlives horovodrun for a moment: it takes its semaphores out of /dev/shm.
        while _marked(command.mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        _kill_marked(command.mark)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a broken driver can hold nvidia-smi in the kernel
            process.wait(_GRACE_S)


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has this mark: launchers put workers into sessions of their own."""
    return processes.started_with({_MARK: mark})


def _kill_marked(mark: str) -> None:
    deadline = time.monotonic() + _GRACE_S
    # Until there are none: one may fork while the others are looked through, and a kill is not an end yet.
    while (found := _marked(mark)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)


def answer(ran: Ran) -> dict[str, Any]:
    """What a child process told last; {"error": why} where it told nothing, crashed or did not end."""
    told: list[dict[str, Any]] = []
    for line in ran.output.splitlines():
        _, found, text = line.partition(ANSWER)
        with contextlib.suppress(ValueError):
            told += [json.loads(text)] if found else []
    facts = told[-1] if told else {}
    if ran.code is None:
        return {**facts, "error": f"no end in {ran.seconds:.0f} s"}
    if ran.code < 0:
        return {**facts, "error": f"killed by {_signal_name(-ran.code)}"}
    if not told or ran.code:
        return {**facts, "error": first_error(ran.output) or f"exit code {ran.code}, and no word of why"}
    return facts


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_error(output: str) -> str:
    """What says most in the output of a failed command: an exception, a sentence about an error, or the first line."""
    # [1,0]<stderr>: is Open MPI's, [0]<stderr>: Horovod's, [0] MPICH's
    lines = [re.sub(r"^\[[\d,]+\](<\w+>:?)? ?", "", line).strip() for line in output.splitlines()]
    lines = ["" if ANSWER in line or not re.search(r"\w", line) else line for line in lines]
    for line in lines:
        if re.match(r"(\w+\.)*\w*(Error|Exception): ", line):
            return line[:300]
    trouble = r"(?i)\b(error|fail(ed|ure)?|fatal|cannot|could not|unable|undefined|not found|no such|not enough)\b"
    for index, line in enumerate(lines):
        if re.search(trouble, line):
            return _sentence(lines[index:])[:300]
    return next((line[:300] for line in lines if line), "")


def _sentence(lines: list[str]) -> str:
    """The first lines as one, up to the end of the sentence or an empty line: mpirun breaks its sentences."""
    words = []
    for line in lines:
        if not line:
            break
        words.append(line)
        if line.endswith((".", "!", ":")):
            break
    return " ".join(words)
