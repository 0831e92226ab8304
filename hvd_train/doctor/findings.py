"""A finding, and the judges of Python, torch, the GPUs and the machine: facts in, one line of the table out.

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

from hvd_train.doctor import probe
from hvd_train.doctor.probe import Ran

Verdict = Literal["ok", "warning", "broken"]
Facts = Mapping[str, Any]
"""What a child process or a file said; "error" is there where it could not say it all."""

GB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the table. `todo` is what to type where all is not well."""

    name: str
    verdict: Verdict
    what: str
    todo: str = ""


# ----------------------------------------------------------------------------------------------------- python and torch


def check_python(version: tuple[int, ...], prefix: str) -> Finding:
    """3.10 to 3.13 are supported."""
    what = f"{'.'.join(str(part) for part in version)} in {prefix}"
    if version[:2] < (3, 10):
        return Finding("python", "broken", what, "hvd_train needs Python 3.10 or newer: make the environment with one")
    if version[:2] > (3, 13):
        return Finding("python", "warning", what, "newer than was tried; 3.10 to 3.13 are known to work")
    return Finding("python", "ok", what)


def check_hvd_train(version: str, folder: Path) -> Finding:
    """Which hvd_train this is, since there can be several on one machine."""
    return Finding("hvd_train", "ok", f"{version} in {folder}")


def check_torch(torch: Facts) -> Finding:
    """Torch is there, can be imported and is 2.6 or newer."""
    if "version" not in torch:
        absent = "No module named 'torch'" in torch["error"]
        what = "not installed" if absent else f"import torch: {torch['error']}"
        return Finding("torch", "broken", what, "in a checkout of hvd_train type `make env`, or pip install torch")
    what = f"{torch['version']}, built for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'the CPU only'}"
    if version_numbers(torch["version"]) < (2, 6):
        return Finding("torch", "warning", what, "older than was tried: pip install 'torch>=2.6', then build Horovod")
    return Finding("torch", "ok", what)


def check_torchvision(torch: Facts) -> Finding:
    """Torchvision has the models; it loads only beside the torch it was built for."""
    if "torchvision" in torch:
        return Finding("torchvision", "ok", torch["torchvision"])
    why = torch.get("torchvision_error") or torch.get("error", "no word of why")
    if "No module named 'torchvision'" in why:
        return Finding("torchvision", "broken", "not installed", "pip install torchvision, from where torch came")
    todo = f"install the torchvision that goes with torch {torch['version']}, both from one package index"
    return Finding("torchvision", "broken", f"import torchvision: {why}", todo)


def check_jpeg(torch: Facts) -> Finding:
    """Whether class folders are read as fast as they can be."""
    if torch.get("jpeg_parts"):
        return Finding("jpeg", "ok", "of a JPEG only the part that a crop looks at is decoded")
    what = torch.get("jpeg_parts_error") or "hvd_train was built without a C compiler, or Pillow has no libjpeg-turbo"
    todo = "apt install gcc (or your system's), then `make env`, or pip install hvd_train again"
    return Finding("jpeg", "warning", f"class folders are read at about half the speed: {what}", todo)


def check_gpus(torch: Facts, smi: Ran | None, visible: str | None) -> Finding:
    """The GPUs that torch sees, against those that the driver lists."""
    listed = [line.strip() for line in smi.output.splitlines() if line.strip()] if smi and smi.code == 0 else []
    if gpus := torch.get("gpus"):
        drivers = {line.rpartition(", ")[2] for line in listed}
        driver = f"; driver {', '.join(sorted(drivers))}" if drivers else ""
        names = [f"{name} ({memory / GB:.0f} GB)" for name, memory in gpus]
        each = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        return Finding("GPUs", "ok", ", ".join(each) + driver)
    if not listed:
        if smi and smi.code != 0:
            what = f"none can be used: {probe.first_error(smi.output) or 'nvidia-smi does not answer'}"
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
    why = f": {torch['gpu_trouble']}" if torch.get("gpu_trouble") else ""
    todo = f"take a driver for CUDA {torch['cuda']} or newer, or a torch for the CUDA that nvidia-smi shows"
    if visible is not None:
        todo = f"see whether CUDA_VISIBLE_DEVICES={visible!r} is right; if so, {todo}"
    return Finding("GPUs", "broken", f"{here}, but torch sees none{why}", todo)


def version_numbers(version: str) -> tuple[int, ...]:
    """2.15.0+cu132 as (2, 15, 0), which compares as versions do."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


# ---------------------------------------------------------------------------------------------------------- the machine


def check_machine(torch: Facts) -> list[Finding]:
    """Memory to share, files, processors and disk, as they are here and now."""
    return [
        check_shared_memory(_disk(Path("/dev/shm"))),  # noqa: S108  # the one place where Linux has it
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_processors(len(os.sched_getaffinity(0)), cpu_quota(Path("/sys/fs/cgroup/cpu.max")), torch.get("threads")),
        check_disk(_disk(Path()), writable=os.access(".", os.W_OK)),
    ]


def check_shared_memory(sizes: tuple[int, int] | None) -> Finding:
    """Loader workers, Open MPI and NCCL pass data through /dev/shm; docker gives 64 MB unless told."""
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
    """Each tensor that a loader worker passes on is an open file."""
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    if limit < 1024:
        return Finding("open files", "warning", f"at most {limit}", "ulimit -n 4096, in the shell that starts training")
    return Finding("open files", "ok", f"at most {limit}")


def cpu_quota(path: Path) -> float | None:
    """The processors that a container may use, in the words of its control group; None without a limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()[:2]
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max" is no number
        return None


def check_processors(cores: int, quota: float | None, threads: int | None) -> Finding:
    """Ranks share the cores they see; a time quota is not seen, and too many threads wait for one another."""
    told = f", torch starts {threads} threads" if threads else ""
    if quota is not None and quota < cores:
        what = f"{cores} cores in sight, but time for {quota:g} only{told}"
        number = max(1, int(quota))
        todo = f"give the container cores in place of time: `docker run --cpuset-cpus 0-{number - 1}`"
        return Finding("processors", "warning", what, todo)
    return Finding("processors", "ok", f"{cores} core{'s' * (cores != 1)}{told}")


def check_disk(sizes: tuple[int, int] | None, *, writable: bool) -> Finding:
    """Runs go below the current folder unless --output-dir says otherwise."""
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
