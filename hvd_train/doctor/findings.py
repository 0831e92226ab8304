"""Checks of Python, torch, the GPUs and the machine: each turns facts into a finding, one line of the doctor's table.

`doctor` collects the facts that take a child process; `check_machine` asks the system itself.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvd_train.doctor import questions
from hvd_train.doctor.children import Outcome

Verdict = Literal["ok", "warning", "broken"]
Facts = Mapping[str, Any]
"""The answer of a child process or the content of a file; it has "error" where it is not complete."""

GB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    verdict: Verdict
    what: str
    """What was found."""
    todo: str = ""
    """What to type; empty where the verdict is "ok"."""


# ----------------------------------------------------------------------------------------------------- python and torch


def check_python(version: tuple[int, ...], prefix: str) -> Finding:
    """Check that Python is one of 3.10 to 3.13, which are supported; `prefix` is the folder of its environment."""
    what = f"{'.'.join(str(part) for part in version)} in {prefix}"
    if version[:2] < (3, 10):
        return Finding("python", "broken", what, "hvd_train needs Python 3.10 or newer: make the environment with one")
    if version[:2] > (3, 13):
        return Finding("python", "warning", what, "newer than any version tried; 3.10 to 3.13 are known to work")
    return Finding("python", "ok", what)


def check_hvd_train(version: str, folder: Path) -> Finding:
    """Say which hvd_train this is, since one machine can have several."""
    return Finding("hvd_train", "ok", f"{version} in {folder}")


def check_torch(torch: Facts) -> Finding:
    """Check that torch is installed, can be imported and is 2.6 or newer."""
    if "version" not in torch:
        absent = "No module named 'torch'" in torch["error"]
        what = "not installed" if absent else f"import torch: {torch['error']}"
        return Finding("torch", "broken", what, "in a checkout of hvd_train type `make env`, or pip install torch")
    what = f"{torch['version']}, built for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'the CPU only'}"
    if version_numbers(torch["version"]) < (2, 6):
        return Finding(
            "torch", "warning", what, "older than any version tried: pip install 'torch>=2.6', then build Horovod"
        )
    return Finding("torch", "ok", what)


def check_torchvision(torch: Facts) -> Finding:
    """Check that torchvision, which has the models, loads: it does so only beside the torch it was built for."""
    if "torchvision" in torch:
        return Finding("torchvision", "ok", torch["torchvision"])
    why = torch.get("torchvision_error") or torch.get("error", "no reason was given")
    if "No module named 'torchvision'" in why:
        return Finding("torchvision", "broken", "not installed", "pip install torchvision, from where torch came")
    todo = f"install the torchvision that goes with torch {torch['version']}, both from one package index"
    if why.startswith(questions.NO_END):
        todo = "type the same again when this machine, or the file system with Python's packages, is less busy"
    return Finding("torchvision", "broken", f"import torchvision: {why}", todo)


def check_jpeg(torch: Facts) -> Finding:
    """Check that class folders can be read fast, by decoding parts of JPEG files."""
    if torch.get("jpeg_parts"):
        return Finding("jpeg", "ok", "of a JPEG only the part that a crop looks at is decoded")
    what = torch.get("jpeg_parts_error") or "hvd_train was built without a C compiler, or Pillow has no libjpeg-turbo"
    todo = "apt install gcc (or your system's), then `make env`, or pip install hvd_train again"
    return Finding("jpeg", "warning", f"class folders are read at about half the speed: {what}", todo)


def check_gpus(torch: Facts, smi: Outcome | None, visible: str | None) -> Finding:
    """Compare the GPUs that torch sees with those that the driver lists.

    `smi` is the outcome of nvidia-smi where there is one, `visible` the value of CUDA_VISIBLE_DEVICES where it is set.
    """
    listed = [line.strip() for line in smi.output.splitlines() if line.strip()] if smi and smi.code == 0 else []
    if gpus := torch.get("gpus"):
        drivers = {line.rpartition(", ")[2] for line in listed}
        driver = f"; driver {', '.join(sorted(drivers))}" if drivers else ""
        names = [f"{name} ({memory / GB:.0f} GB)" for name, memory in gpus]
        each = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        return Finding("GPUs", "ok", ", ".join(each) + driver)
    if found := torch.get("gpus_unusable"):
        why, todo = found
        return Finding("GPUs", "broken", why, f"{todo}; `hvd-train train --device cpu` trains on the CPU meanwhile")
    if not listed:
        if smi and smi.code != 0:
            what = f"none can be used: {questions.first_error(smi.output) or 'nvidia-smi does not answer'}"
            todo = "if this machine has a GPU, its driver needs mending: type nvidia-smi; the CPU trains meanwhile"
            return Finding("GPUs", "warning", what, todo)
        return Finding("GPUs", "ok", "none: training runs on the CPU")
    here = f"the driver lists {len(listed)} ({listed[0]})"
    if "version" not in torch:
        return Finding("GPUs", "warning", f"{here}; torch could not be asked", "mend torch first")
    if not torch["cuda"]:
        todo = "pip install a CUDA build of torch, then build Horovod again"
        return Finding("GPUs", "warning", f"{here}, but this torch is built for the CPU only", todo)
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding("GPUs", "ok", f"{here}, hidden by CUDA_VISIBLE_DEVICES={visible!r}")
    why = f": {torch['gpu_warning']}" if torch.get("gpu_warning") else ""
    todo = f"take a driver for CUDA {torch['cuda']} or newer, or a torch for the CUDA that nvidia-smi shows"
    if visible is not None:
        todo = f"see whether CUDA_VISIBLE_DEVICES={visible!r} is right; if so, {todo}"
    return Finding("GPUs", "broken", f"{here}, but torch sees none{why}", todo)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return 2.15.0+cu132 as (2, 15, 0), which compares as versions do."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


# ---------------------------------------------------------------------------------------------------------- the machine


def check_machine(torch: Facts) -> list[Finding]:
    """Check shared memory, open files, processors and disk of this machine, for a run in the current folder."""
    return [
        check_shared_memory(_disk(Path("/dev/shm"))),  # noqa: S108  # the one place where Linux has it
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_processors(len(os.sched_getaffinity(0)), cpu_quota(Path("/sys/fs/cgroup/cpu.max")), torch.get("threads")),
        check_disk(_disk(Path()), writable=os.access(".", os.W_OK)),
    ]


def check_shared_memory(sizes: tuple[int, int] | None) -> Finding:
    """Check /dev/shm (total and free bytes), through which loader workers, Open MPI and NCCL pass data.

    A docker container has 64 MB of it unless it was started with more.
    """
    todo = "in docker: `docker run --shm-size 8g` or `--ipc=host`; elsewhere: mount -o remount,size=8G /dev/shm"
    if sizes is None:
        return Finding("shared memory", "warning", "there is no /dev/shm", todo)
    total, free = sizes
    what = f"{_size(total)} in /dev/shm, {_size(free)} free"
    if total < GB:
        return Finding("shared memory", "warning", what, todo)
    if free < GB // 4:
        return Finding("shared memory", "warning", what, "see what fills it: ls -lS /dev/shm")
    return Finding("shared memory", "ok", what)


def check_open_files(limit: int) -> Finding:
    """Check how many files a process may open: each tensor that a loader worker passes on is one."""
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    if limit < 1024:
        return Finding("open files", "warning", f"at most {limit}", "ulimit -n 4096, in the shell that starts training")
    return Finding("open files", "ok", f"at most {limit}")


def cpu_quota(path: Path) -> float | None:
    """Return how many processors' time a container may use, from its control group's cpu.max; None without a limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()[:2]
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max" is no number
        return None


def check_processors(cores: int, quota: float | None, threads: int | None) -> Finding:
    """Compare the cores that ranks see and share with the quota of time.

    Torch alone starts `threads` threads, one for each core: with a smaller quota they wait for one another. A training
    has no more of them than there is time for.
    """
    torch_threads = f", torch starts {threads} threads" if threads else ""
    if quota is not None and quota < cores:
        what = f"{cores} cores are visible, but there is time for only {quota:g}{torch_threads}"
        number = max(1, int(quota))
        todo = f"give the container cores instead of time: `docker run --cpuset-cpus 0-{number - 1}`"
        return Finding("processors", "warning", what, todo)
    return Finding("processors", "ok", f"{cores} core{'s' * (cores != 1)}{torch_threads}")


def check_disk(sizes: tuple[int, int] | None, *, writable: bool) -> Finding:
    """Check the disk (total and free bytes) of the current folder, where runs go unless --output-dir names another."""
    if sizes is None or not writable:
        return Finding("disk", "warning", "this folder cannot be written to", "give `hvd-train train` an --output-dir")
    if sizes[1] < GB:
        todo = "free some, or give `hvd-train train` an --output-dir elsewhere"
        return Finding("disk", "warning", f"{_size(sizes[1])} free in this folder", todo)
    return Finding("disk", "ok", f"{_size(sizes[1])} free in this folder")


def _disk(folder: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free


def _size(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 2**20:.0f} MB"
