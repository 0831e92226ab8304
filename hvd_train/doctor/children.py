"""Child processes of the doctor, the programs that they run, and their answers."""

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

_GRACE_S = 10.0  # horovodrun gives its workers 5 s


@dataclass(frozen=True)
class Outcome:
    """How a child ended, with its output. `code` is None after a timeout, and negative after a signal."""

    code: int | None
    output: str
    seconds: float = 0.0


def run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Outcome:
    """Run a command in a session of its own; terminate it when its time is up, or the doctor's.

    Workers of a launcher have other sessions: the launcher ends them, or they end themselves after `_LIMIT_S`.
    """
    code, started = None, time.monotonic()
    with tempfile.TemporaryFile() as output:  # an orphan could hold a pipe open for ever
        process = Popen(
            ["/usr/bin/env", *command],  # 127: there is no such program
            env=environ,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )
        try:
            with suppress(TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            seconds = time.monotonic() - started
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    with suppress(TimeoutExpired):  # a broken driver can hold nvidia-smi in the kernel
                        process.wait(_GRACE_S)
        output.seek(0)
        return Outcome(code, output.read().decode(errors="replace"), seconds)


ANSWER = "hvd-train doctor: "
_LIMIT_S = 90  # a program ends itself after this, even if the doctor was killed

# The current folder, first on the path, may hold an unpacked Horovod. `answer` writes once: launchers mix output.
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

_TORCH = """
try:
    import torch
except Exception as error:
    answer({"error": reason(error)})
    sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    available = torch.cuda.is_available()
facts["gpu_warning"] = str(caught[0].message).splitlines()[0] if caught else ""
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if available else 0)]
facts["gpus"] = [[device.name, device.total_memory] for device in devices]
facts["capabilities"] = [10 * device.major + device.minor for device in devices]
answer(facts)  # the last answer counts: if torchvision crashes, this is it
try:
    import torchvision
    facts["torchvision"] = torchvision.__version__
except Exception as error:
    facts["torchvision_error"] = reason(error)
answer(facts)
"""

_HOROVOD = """
try:
    import horovod.torch as hvd
    if not hasattr(hvd, "init"):  # the release prints the reason and continues
        raise ImportError("horovod.torch has no extension module for this Python")
    answer({"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())})
except Exception as error:
    answer({"error": reason(error)})
"""

# Arguments: the device, then the numbers of bytes to time. The sum is over a megabyte, so that the transport is used.
_ALLREDUCE = """
import time
import torch
import horovod.torch as hvd
hvd.init()
device, times = sys.argv[1], []
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank())
total = hvd.allreduce(torch.full((262144,), hvd.rank() + 1.0, device=device), op=hvd.Sum, name="doctor")
for count in map(int, sys.argv[2:]):
    values, best = torch.ones(count // 4, device=device), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        hvd.allreduce_(values, op=hvd.Average, name=f"doctor.{count}")
        best = min(best, time.perf_counter() - started)
    times.append([count, best])
if hvd.rank() == 0:
    answer({"size": hvd.size(), "sums": total.unique().tolist()[:4], "times": times})
hvd.shutdown()
"""

TORCH, HOROVOD, ALLREDUCE = (_PRELUDE + program for program in (_TORCH, _HOROVOD, _ALLREDUCE))


def answer(outcome: Outcome) -> dict[str, Any]:
    """Return the last answer of a child, with {"error": reason} if it failed."""
    answers: list[dict[str, Any]] = []
    for line in outcome.output.splitlines():
        _, found, text = line.partition(ANSWER)
        with suppress(ValueError):
            answers += [json.loads(text)] if found else []
    facts = answers[-1] if answers else {}
    if outcome.code is None:
        return {**facts, "error": f"no end in {outcome.seconds:.0f} s"}
    if outcome.code < 0:
        return {**facts, "error": f"killed by {signal.Signals(-outcome.code).name}"}
    if not answers or outcome.code:
        return {**facts, "error": first_error(outcome.output) or f"exit code {outcome.code}, without output"}
    return facts


def first_error(output: str) -> str:
    """Return the exception, else a line about an error, else the first line of an output, or ""."""
    # [1,0]<stderr>: is Open MPI's, [0]<stderr>: Horovod's, [0] MPICH's
    lines = [re.sub(r"^\[[\d,]+\](<\w+>:?)? ?", "", line).strip() for line in output.splitlines()]
    lines = ["" if ANSWER in line or not re.search(r"\w", line) else line for line in lines]
    for line in lines:
        if re.match(r"(\w+\.)*\w*(Error|Exception): ", line):
            return line[:300]
    about_errors = r"(?i)\b(error|fail(ed|ure)?|fatal|cannot|could not|unable|undefined|not found|no such|not enough)\b"
    found = [line for line in lines if re.search(about_errors, line)] or [line for line in lines if line]
    return found[0][:300] if found else ""
