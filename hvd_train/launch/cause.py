"""Say why a process of a job ended: its exit code in words, and what the kernel says about memory.

No torch.
"""

import faulthandler
import hashlib
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hvd_train.launch import client
from hvd_train.launch.launcher import launched

_STDERR = 2
_ROOT = Path("/")
# what ranks of one job have in common: from horovodrun, mpirun and srun
_JOB = (client.KEY, "PMIX_NAMESPACE", "SLURM_STEP_ID")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_UNLIMITED = 1 << 60  # bytes: cgroups of version 1 have such a limit if they have none

_claims = list[socket.socket]()


def in_words(exit_code: int) -> str:
    """Return `was killed by signal 11 (SIGSEGV)` for -11 or 139, `ended with exit code 3` for 3."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with exit code {exit_code}"
    why = ", as the kernel does if memory is short" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}){why}"


def kind_of(error: str) -> str:
    """Return the text of an error without addresses and numbers, in which its copies differ."""
    return _NUMBERS.sub("", error)


def show_native_crashes() -> None:
    """Let a crash in C code print the Python frames of its thread, in place of pages of addresses.

    UCX and Open MPI print those; call this before they are loaded.
    """
    if launched(os.environ):
        os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
        os.environ.setdefault("OMPI_MCA_opal_signal", "")
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR, all_threads=False)


def is_first_on_host(environ: Mapping[str, str], text: str) -> bool:
    """Claim a text for this process; return False if another rank of this job and host has it."""
    job = [environ[name] for name in _JOB if name in environ]
    if not job or launched(environ) is None:
        return True
    whose = [os.getuid(), environ.get("SLURM_JOB_ID"), *job, kind_of(text)]
    digest = hashlib.sha256(repr(whose).encode()).hexdigest()
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0hvd_train-{digest}")  # a name that ends with its process
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def killed_for_memory(root: Path = _ROOT) -> str:
    """Return a line if the kernel has killed processes of this host for lack of memory since the
    last call, or since this process began; else an empty text.
    """
    before = dict(_counts)
    found = _kills(root)
    _counts.update(found)
    for file, count in found.items():
        if count > before.get(file, count):
            killed = f"on {socket.gethostname()} the kernel has killed a process for lack of memory"
            return f"{killed}{_limit_of(file)}"
    return ""


def _kills(root: Path) -> dict[Path, int]:
    """Return how many processes the kernel has killed to free memory, by the file that says so.

    First come the cgroups of this process, the innermost first, then the whole host.
    """
    found = {}
    for file in _counters(root):
        with suppress(OSError):
            if count := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                found[file] = int(count[1])
    return found


def _counters(root: Path) -> Iterator[Path]:
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                mounted = root / "sys/fs/cgroup" / controllers
                folder = mounted / path.lstrip("/")
                name = "memory.oom_control" if controllers else "memory.events"
                while folder.is_relative_to(mounted):
                    yield folder / name
                    folder = folder.parent
    yield root / "proc/vmstat"


def _limit_of(counter: Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            if (limit := int(counter.with_name(name).read_text())) < _UNLIMITED:
                return f": the limit of {counter.parent} is {limit / 2**30:.1f} GiB"
    return ""


_counts = _kills(_ROOT)
