"""What the doctor asks in child processes, as programs for `python -c`, and how their answers are read.

A crash, a hang or a missing library ends the child alone, and is an answer here.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from typing import Any

from hvd_train.doctor.children import Outcome

ANSWER = "hvd-train doctor: "
NO_END = "no end in"  # begins the reason where the time for an answer was over
_LIMIT_S = 90  # a program ends itself after this, should even the doctor have been killed

# `python -c` puts the current folder first on the path, where an unpacked Horovod may lie. `answer` writes at once and
# in one piece: launchers mix the output of ranks.
_PRELUDE = f"""
import json, os, signal, sys, warnings
sys.path = [folder for folder in sys.path if folder]
signal.alarm({_LIMIT_S})
def answer(facts):
    sys.stdout.flush()
    os.write(1, ("\\n{ANSWER}" + json.dumps(facts) + "\\n").encode())
def reason(error):
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
    answer({"error": reason(error)})
    sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    available = torch.cuda.is_available()
facts["gpu_warning"] = str(caught[0].message).splitlines()[0] if caught else ""
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if available else 0)]
facts["gpus"] = [[device.name, device.total_memory] for device in devices]
facts["capabilities"] = [10 * device.major + device.minor for device in devices]
if torch.version.cuda and not facts["gpus"]:
    try:
        from hvd_train.doctor import nvidia
        found = nvidia.unusable(torch.version.cuda)
        facts["gpus_unusable"] = [found.why, found.todo] if found else None
    except Exception as error:
        facts["gpu_warning"] = reason(error)
try:
    facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
except Exception:
    facts["nccl"] = None
answer(facts)  # the last answer counts: should torchvision crash, this is it
try:
    import torchvision
    facts["torchvision"] = torchvision.__version__
except Exception as error:
    facts["torchvision_error"] = reason(error)
answer(facts)
try:
    from hvd_train.data import pictures
    facts["jpeg_parts"] = pictures.region_library() is not None
except Exception as error:
    facts["jpeg_parts_error"] = reason(error)
answer(facts)
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
    answer({"error": reason(error)})
    sys.exit()
import ctypes
facts = {"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built()), "libmpi": ""}
with open("/proc/self/maps") as maps:
    loaded = {line.split(None, 5)[5].strip() for line in maps if "/libmpi.so" in line}
for path in loaded:
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(path).MPI_Get_library_version(text, ctypes.byref(length))
    facts["libmpi"] = text.value.decode(errors="replace")
answer(facts)
"""
)

MPI4PY = (
    _PRELUDE
    + """
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    answer({"version": mpi4py.__version__, "libmpi": MPI.Get_library_version()})
except Exception as error:
    answer({"error": reason(error)})
"""
)

# A megabyte, so that the transport is used, not the handshake alone.
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
    answer({"size": hvd.size(), "sums": sums[:4], "controller": "Gloo" if hvd.gloo_enabled() else "MPI"})
hvd.shutdown()
"""
)

# From 1 KB to 64 MB. The shortest of a few times counts: a disturbance only adds to a time.
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
    answer({"size": hvd.size(), "times": times})
hvd.shutdown()
"""
)


def answer(outcome: Outcome) -> dict[str, Any]:
    """Return the last answer that a child gave, with {"error": reason} where it gave none, crashed or did not end."""
    answers: list[dict[str, Any]] = []
    for line in outcome.output.splitlines():
        _, found, text = line.partition(ANSWER)
        with contextlib.suppress(ValueError):
            answers += [json.loads(text)] if found else []
    facts = answers[-1] if answers else {}
    if outcome.code is None:
        return {**facts, "error": f"{NO_END} {outcome.seconds:.0f} s"}
    if outcome.code < 0:
        return {**facts, "error": f"killed by {_signal_name(-outcome.code)}"}
    if not answers or outcome.code:
        reason = first_error(outcome.output) or f"exit code {outcome.code}, and no word of why"
        return {**facts, "error": reason}
    return facts


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_error(output: str) -> str:
    """Return what says most in the output of a failed command, or "" where it has no words at all.

    That is an exception, else a sentence about an error, else the first line; 300 characters of it at most.
    """
    # [1,0]<stderr>: is Open MPI's, [0]<stderr>: Horovod's, [0] MPICH's
    lines = [re.sub(r"^\[[\d,]+\](<\w+>:?)? ?", "", line).strip() for line in output.splitlines()]
    lines = ["" if ANSWER in line or not re.search(r"\w", line) else line for line in lines]
    for line in lines:
        if re.match(r"(\w+\.)*\w*(Error|Exception): ", line):
            return line[:300]
    about_errors = r"(?i)\b(error|fail(ed|ure)?|fatal|cannot|could not|unable|undefined|not found|no such|not enough)\b"
    for index, line in enumerate(lines):
        if re.search(about_errors, line):
            return _sentence(lines[index:])[:300]
    return next((line[:300] for line in lines if line), "")


def _sentence(lines: list[str]) -> str:
    """Join the first lines up to the end of their sentence or an empty line: mpirun breaks its sentences."""
    words = []
    for line in lines:
        if not line:
            break
        words.append(line)
        if line.endswith((".", "!", ":")):
            break
    return " ".join(words)
