"""`hvd-train doctor`: the checks of this machine and its build of Horovod, listed in `MACHINE_CHECKS`."""

import os
import re
import resource
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvd_train.doctor import agent
from hvd_train.doctor.children import ALLREDUCE, HOROVOD, TORCH, Outcome, answer, first_error, run

Verdict = Literal["ok", "warning", "broken"]
Facts = Mapping[str, Any]  # the answer of a child process or of an agent; "error" says why it is not complete

AGENT = (sys.executable, "-m", agent.__name__)
_LIMIT_S = 60.0
GB = 2**30
# Without these, a lost worker costs half a minute, NCCL can deliver half a sum, and 127.0.1.1 keeps hosts out.
NEEDED_PATCHES = {"C1", "C2", "C3", "C4", "C5", "C6", "C12"}
REBUILD = "in a checkout of hvd_train type `make env`, or `python packaging/build_horovod.py`"
REBUILD_AGAIN = "in a checkout of hvd_train type `python packaging/build_horovod.py --force`"


@dataclass(frozen=True)
class Finding:
    """The result of a check, and what to type if it is not ok."""

    name: str
    verdict: Verdict
    what: str
    todo: str = ""


@dataclass(frozen=True)
class Machine:
    """The facts that the checks judge."""

    host: Facts  # from `agent`
    torch: Facts = field(default_factory=dict)  # from `TORCH`
    horovod: Facts = field(default_factory=dict)  # from `HOROVOD`
    horovodrun: str | None = None  # a path
    mpirun: str | None = None  # a path
    mpirun_version: Outcome | None = None
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES

    @property
    def build(self) -> Facts:
        """The build record of Horovod; empty if it was built elsewhere or is not installed."""
        return (self.host["horovod"] or {}).get("build") or {}


Check = Callable[[Machine], Finding | None]  # returns None if it does not apply


def _check_python(machine: Machine) -> Finding:
    return Finding("python", "ok", "{python} in {prefix}, hvd_train {hvd_train} in {folder}".format(**machine.host))


def _check_torch(machine: Machine) -> Finding:
    """Check that torch 2.6 or newer and its torchvision can be imported."""
    torch = machine.torch
    if "version" not in torch:
        what = f"import torch: {torch['error']}"
        return Finding("torch", "broken", what, "in a checkout of hvd_train type `make env`, or pip install torch")
    what = f"{torch['version']}, built for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'the CPU only'}"
    if "torchvision" not in torch:
        what += f"; import torchvision: {torch.get('torchvision_error') or torch.get('error')}"
        return Finding("torch", "broken", what, "install torch and torchvision from the same package index")
    what += f"; torchvision {torch['torchvision']}"
    if tuple(int(part) for part in re.findall(r"\d+", torch["version"])[:2]) < (2, 6):
        return Finding("torch", "warning", what, "too old: pip install 'torch>=2.6', then build Horovod again")
    return Finding("torch", "ok", what)


def _check_gpus(machine: Machine) -> Finding:
    """Check that torch sees the GPUs that the driver lists."""
    torch, listed, visible = machine.torch, machine.host["gpus"]["listed"], machine.visible_gpus
    if gpus := torch.get("gpus"):
        names = [f"{name} ({memory / GB:.0f} GB)" for name, memory in gpus]
        each = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        drivers = {line.rpartition(", ")[2] for line in listed}
        return Finding("GPUs", "ok", f"{each}; driver {', '.join(sorted(drivers))}" if drivers else each)
    if error := machine.host["gpus"].get("error"):
        return Finding("GPUs", "warning", error, "if this machine has a GPU, fix its driver: type nvidia-smi")
    if not listed:
        return Finding("GPUs", "ok", "none: training runs on the CPU")
    here = f"the driver lists {len(listed)} ({listed[0]})"
    if not torch.get("cuda"):
        todo = "pip install a CUDA build of torch, then build Horovod again"
        return Finding("GPUs", "warning", f"{here}, but this torch is built for the CPU only, or missing", todo)
    if visible is not None:
        what = f"{here}, but torch sees none with CUDA_VISIBLE_DEVICES={visible!r}"
        return Finding("GPUs", "warning", what, "if that is not on purpose, type: unset CUDA_VISIBLE_DEVICES")
    why = f": {torch['gpu_warning']}" if torch["gpu_warning"] else ""
    todo = f"install a driver for CUDA {torch['cuda']} or newer, or a torch for the CUDA that nvidia-smi shows"
    return Finding("GPUs", "broken", f"{here}, but torch sees none{why}", todo)


def _check_horovod(machine: Machine) -> Finding:
    """Check that Horovod is installed, with a build record and the patches."""
    installed, build = machine.host["horovod"], machine.build
    if installed is None:
        return Finding("horovod", "warning", "not installed: training runs in one process only", REBUILD)
    what = f"{installed['version']} in {installed['folder']}"
    if not build:
        return Finding("horovod", "warning", f"{what}, built elsewhere, most likely without our patches", REBUILD)
    what += f", built {str(build.get('built'))[:10]} with {build.get('compiler')}"
    if missing := NEEDED_PATCHES - {patch["name"] for patch in build.get("patches", ())}:
        return Finding("horovod", "warning", f"{what}, without the patches {', '.join(sorted(missing))}", REBUILD)
    return Finding("horovod", "ok", what)


def _check_horovod_loads(machine: Machine) -> Finding | None:
    """Check that Horovod can be imported, and was built against this torch."""
    name, torch, build = "horovod loads", machine.torch, machine.build
    if machine.host["horovod"] is None or "version" not in torch:
        return None
    stale = build.get("torch", torch["version"]) != torch["version"]
    against = f"it was built against torch {build.get('torch')}, here is {torch['version']}"
    if error := machine.horovod.get("error"):
        absent = re.search(r"No module named '(?!horovod)(\w+)", error)
        todo = f"pip install {absent[1]}" if absent else f"rebuild it: {REBUILD if stale else REBUILD_AGAIN}"
        return Finding(name, "broken", f"{error} ({against})" if stale else error, todo)
    if stale:
        return Finding(name, "warning", against, REBUILD)
    return Finding(name, "ok", f"with torch {torch['version']}")


def _check_built_in(machine: Machine) -> Finding | None:
    """Check that Horovod has Gloo, and NCCL if there are GPUs."""
    has = machine.horovod
    if "gloo" not in has:
        return None
    what = ", ".join(name for name in ("Gloo", "MPI", "NCCL") if has[name.lower()]) or "nothing"
    if not has["gloo"]:
        return Finding("built in", "warning", f"{what}: no elastic jobs, no horovodrun --gloo", REBUILD)
    if machine.torch.get("gpus") and not has["nccl"]:
        return Finding("built in", "warning", f"{what}: gradients of GPUs travel through the CPU", REBUILD)
    archs = machine.build.get("cuda_archs") or [0]
    for gpu in machine.torch.get("capabilities", ()):
        # Code for 80 runs on 80 to 89, and the driver translates that for the highest number for all later GPUs.
        if not any(arch <= gpu and arch // 10 == gpu // 10 for arch in archs) and gpu < max(archs):
            return Finding("built in", "broken", f"kernels for GPUs {archs}, but this GPU is {gpu}", REBUILD_AGAIN)
    return Finding("built in", "ok", what)


def _check_mpi(machine: Machine) -> Finding:
    """Check that mpirun works and is of the MPI in Horovod."""
    mpirun, version, built_with = machine.mpirun, machine.mpirun_version, str(machine.build.get("mpi") or "")
    if mpirun is None or version is None:
        if machine.horovod.get("mpi"):
            todo = "put its mpirun on the PATH, or use horovodrun --gloo"
            return Finding("MPI", "warning", "Horovod has MPI, but there is no mpirun", todo)
        return Finding("MPI", "ok", "none: Gloo does not need it")
    if version.code != 0:
        what = f"{mpirun} --version: {first_error(version.output) or 'no answer'}"
        return Finding("MPI", "broken", what, "fix it or take it off the PATH; horovodrun --gloo works without it")
    name = _mpi_name(version.output)
    here = f"{name or 'an unknown MPI'} ({mpirun})"
    if machine.horovod.get("mpi") is False:
        return Finding("MPI", "warning", f"{here}, but this Horovod was built without MPI", REBUILD)
    if built_with and name and not built_with.startswith(name.partition(".")[0] + "."):
        todo = f"put the mpirun of {built_with} first on the PATH, or {REBUILD}"
        return Finding("MPI", "warning", f"{here}, but Horovod was built with {built_with}", todo)
    return Finding("MPI", "ok", here)


def _mpi_name(text: str) -> str:
    match = re.search(r"(Open MPI|Intel\(R\) MPI|HYDRA)(?:.*?Version:)?\D*?(\d+(?:\.\d+)+)", text, re.DOTALL)
    return f"{match[1].replace('HYDRA', 'MPICH').replace('(R)', '')} {match[2]}" if match else ""


def _check_shared_memory(machine: Machine) -> Finding:
    name, sizes = "shared memory", machine.host["shared_memory"]
    what = f"{_size(sizes[0])} in /dev/shm, {_size(sizes[1])} free" if sizes else "there is no /dev/shm"
    if sizes and sizes[0] >= GB and sizes[1] >= GB // 4:
        return Finding(name, "ok", what)
    todo = "in docker: `docker run --shm-size 8g` or `--ipc=host`; elsewhere: mount -o remount,size=8G /dev/shm"
    return Finding(name, "warning", what, f"{todo}; ls -lS /dev/shm shows what fills it")


def _check_open_files(machine: Machine) -> Finding:
    limit = machine.host["open_files"]
    what = "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}"
    if limit != resource.RLIM_INFINITY and limit < 1024:
        return Finding("open files", "warning", what, "ulimit -n 4096, in the shell that starts training")
    return Finding("open files", "ok", what)


def _size(count: int) -> str:
    power = 3 if count >= GB else 2 if count >= 2**20 else 1
    return f"{count / 1024**power:.3g} {'KMG'[power - 1]}B"


HOST_CHECKS: Sequence[Check] = (_check_shared_memory, _check_open_files)
_BUILD_CHECKS: Sequence[Check] = (_check_horovod, _check_horovod_loads, _check_built_in, _check_mpi)
MACHINE_CHECKS: Sequence[Check] = (_check_python, _check_torch, _check_gpus, *_BUILD_CHECKS, *HOST_CHECKS)


def examine(*, quick: bool) -> list[Finding]:
    """Return all findings about this machine; `quick` leaves out the allreduces."""
    # The programs of this Python environment come first: it need not be activated.
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    mpirun = shutil.which("mpirun", path=path)
    programs = [(sys.executable, "-c", program) for program in (TORCH, HOROVOD)]
    commands = [AGENT, *programs, (mpirun, "--version") if mpirun else ("false",)]
    environ = {**os.environ, "PATH": path}
    *asked, version = [run(command, environ, _LIMIT_S) for command in commands]
    host, torch, horovod = map(answer, asked)
    horovodrun, visible = shutil.which("horovodrun", path=path), os.environ.get("CUDA_VISIBLE_DEVICES")
    machine = Machine(host, torch, horovod, horovodrun, mpirun, version, visible)
    if error := machine.host.get("error"):
        return [Finding("this machine", "broken", error, f"to see why, type: {shlex.join(AGENT)} < /dev/null")]
    findings = [finding for check in MACHINE_CHECKS if (finding := check(machine))]
    return findings + [run_trial(trial, environ, _LIMIT_S) for trial in (() if quick else trials(machine))]


@dataclass(frozen=True)
class Trial:
    """An allreduce over real ranks: a command that starts them, and arguments of `ALLREDUCE`."""

    name: str
    launch: tuple[str, ...]
    ranks: int = 2
    arguments: tuple[str, ...] = ("cpu",)


def trials(machine: Machine) -> Iterator[Trial]:
    """Yield the allreduces that this Horovod and these launchers should run."""
    horovodrun, mpirun, built_in = machine.horovodrun, machine.mpirun, machine.horovod
    controllers = [name for name in ("gloo", "mpi") if built_in.get(name) and (name == "gloo" or mpirun)]
    for name in controllers if horovodrun else ():
        yield Trial(f"horovodrun --{name}", (str(horovodrun), "-np", "2", f"--{name}"))
    if mpirun and "mpi" in controllers:
        open_mpi = machine.mpirun_version and "Open MPI" in machine.mpirun_version.output
        # As horovodrun does: without these flags mpirun refuses to run as root, and two ranks on one core.
        flags = ("--allow-run-as-root", "-H", "localhost:2", "--bind-to", "none") if open_mpi else ()
        yield Trial("mpirun", (mpirun, "-np", "2", *flags))
    if horovodrun and controllers and built_in["nccl"] and len(machine.torch["gpus"]) >= 2:
        yield Trial("NCCL on 2 GPUs", (horovodrun, "-np", "2", f"--{controllers[0]}"), arguments=("cuda",))


def check_trial(trial: Trial, outcome: Outcome) -> Finding:
    """Check that all ranks took part and that their sum is right."""
    found, name, ranks = answer(outcome), trial.name, trial.ranks
    if found.get("size", ranks) != ranks:
        what = f"the ranks did not find each other: world size {found['size']}, not {ranks}"
        todo = f"mpirun and Horovod must have the same MPI; see the line MPI, or {REBUILD}"
        return Finding(name, "broken", what, todo)
    if "error" in found:
        command = " ".join([Path(trial.launch[0]).name, *trial.launch[1:], sys.executable])
        todo = f"to see all it prints, type: {command} -c 'import horovod.torch as hvd; hvd.init()'"
        if trial.arguments[0] == "cuda":
            todo = "set NCCL_DEBUG=INFO and type `hvd-train doctor` again; in a container give it --ipc=host"
        elif outcome.code is None and "--gloo" in trial.launch:
            todo = "a firewall or the wrong network card: set HOROVOD_GLOO_IFACE (to lo on one host) and try again"
        return Finding(name, "broken", found["error"], todo)
    if found["sums"] != [ranks * (ranks + 1) / 2]:
        what = f"the sum of 1 to {ranks} is {', '.join(map(str, found['sums']))}"
        return Finding(name, "broken", what, f"do not train with this build; rebuild it: {REBUILD_AGAIN}")
    carried = 2 * (ranks - 1) / ranks  # by each link of a ring: bus bandwidth (nccl-tests, PERFORMANCE.md)
    timed = [f"{_size(count)} {carried * count / seconds / 1e6:,.1f} MB/s" for count, seconds in found["times"]]
    speed = f"bus bandwidth: {', '.join(timed)}" if timed else f"{outcome.seconds:.1f} s"
    return Finding(name, "ok", f"{ranks} ranks, the sum is right, {speed}")


def run_trial(trial: Trial, environ: Mapping[str, str], limit_s: float) -> Finding:
    """Run an allreduce over real ranks and check its result."""
    command = [*trial.launch, sys.executable, "-c", ALLREDUCE, *trial.arguments]
    return check_trial(trial, run(command, environ, limit_s))
