"""`hvd-train doctor`: the checks of this machine and its build of Horovod, and
allreduces over real ranks.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hvd_train import _version
from hvd_train.console import reasons
from hvd_train.doctor import trial
from hvd_train.doctor.trial import ANSWER
from hvd_train.errors import first_line

Verdict = Literal["ok", "warning", "broken"]
Facts = Mapping[str, Any]

GB = 2**30
# Without these, a lost worker costs half a minute, NCCL can deliver half a sum, and 127.0.1.1 keeps
# hosts out.
NEEDED_PATCHES = {"C1", "C2", "C3", "C4", "C5", "C6", "C12"}
REBUILD = "in a checkout of hvd_train type `make env`, or `python packaging/build_horovod.py`"
REBUILD_AGAIN = "in a checkout of hvd_train type `python packaging/build_horovod.py --force`"
TRIAL = (sys.executable, trial.__file__)


@dataclass(frozen=True)
class Finding:
    """The result of a check, and what to type if it is not ok."""

    name: str
    verdict: Verdict
    what: str
    todo: str = ""


def _check_torch(facts: Facts) -> Finding:
    """Check that torch and its torchvision can be imported."""
    probe = facts["probe"]
    if "torchvision" not in probe:
        todo = (
            "in a checkout of hvd_train type `make env`, or pip install torch and "
            "torchvision from one index"
        )
        return Finding(
            "torch", "broken", f"import {probe.get('importing', 'torch')}: {probe['error']}", todo
        )
    built_for = f"CUDA {probe['cuda']}" if probe["cuda"] else "the CPU only"
    return Finding(
        "torch",
        "ok",
        f"{probe['version']}, built for {built_for}; torchvision {probe['torchvision']}",
    )


def _check_gpus(facts: Facts) -> Finding:
    """Check that torch sees the GPUs that the driver lists."""
    probe = facts["probe"]
    listed = facts["gpus"]["listed"]
    visible = facts["visible_gpus"]
    if gpus := probe.get("gpus"):
        return Finding(
            "GPUs", "ok", f"{gpus} ({', '.join(dict.fromkeys(listed)) or 'nvidia-smi lists none'})"
        )
    if error := facts["gpus"].get("error"):
        return Finding(
            "GPUs", "warning", error, "if this machine has a GPU, fix its driver: type nvidia-smi"
        )
    if not listed:
        return Finding("GPUs", "ok", "none: training runs on the CPU")
    why = probe.get("gpu_warning") or f"it is built for CUDA {probe.get('cuda')}"
    todo = (
        "install a torch for the CUDA that nvidia-smi shows, then build Horovod "
        "again; or a newer driver"
    )
    if visible is not None:
        why = f"CUDA_VISIBLE_DEVICES={visible!r}"
        todo = "if that is not on purpose, type: unset CUDA_VISIBLE_DEVICES"
    what = f"the driver lists {len(listed)} ({listed[0]}), but torch sees none: {why}"
    return Finding(
        "GPUs", "broken" if probe.get("cuda") and visible is None else "warning", what, todo
    )


def _check_horovod(facts: Facts) -> Finding:
    """Check that Horovod is installed, loads, was built for this torch with our
    patches, and has what it needs.
    """
    name = "horovod"
    probe = facts["probe"]
    installed = facts["horovod"]
    if installed is None:
        return Finding(name, "warning", "not installed: training runs in one process only", REBUILD)
    build = installed["build"] or {}
    what = f"{installed['version']} in {installed['folder']}"
    other = (
        f"it was built against torch {build.get('torch', 'of unknown version')}, here is "
        f"{probe.get('version')}"
    )
    if "torchvision" in probe and "gloo" not in probe:
        return Finding(name, "broken", f"{what}: {probe['error']} ({other})", REBUILD_AGAIN)
    if missing := NEEDED_PATCHES - {patch["name"] for patch in build.get("patches", ())}:
        return Finding(
            name, "warning", f"{what}, without the patches {', '.join(sorted(missing))}", REBUILD
        )
    if build.get("torch") != probe.get("version", build.get("torch")):
        return Finding(name, "warning", f"{what}: {other}", REBUILD)
    libraries = {"gloo": "Gloo", "mpi": build.get("mpi") or "MPI", "nccl": "NCCL"}
    has = [library for key, library in libraries.items() if probe.get(key)]
    what += f", built with {build.get('compiler')}; has {', '.join(has)}"
    if probe.get("gpus") and "NCCL" not in has:
        return Finding(
            name, "warning", f"{what}: gradients of GPUs travel through the CPU", REBUILD
        )
    return Finding(name, "ok", what)


def _check_shared_memory(facts: Facts) -> Finding:
    """Check that /dev/shm has room for loaders and NCCL."""
    name = "shared memory"
    sizes = facts["shared_memory"]
    what = (
        f"{sizes[0] / GB:.3g} GB in /dev/shm, {sizes[1] / GB:.3g} GB free"
        if sizes
        else "there is no /dev/shm"
    )
    if sizes and sizes[0] >= GB and sizes[1] >= GB // 4:
        return Finding(name, "ok", what)
    todo = (
        "in docker: `docker run --shm-size 8g` or `--ipc=host`; elsewhere: mount -o "
        "remount,size=8G /dev/shm"
    )
    return Finding(name, "warning", what, f"{todo}; ls -lS /dev/shm shows what fills it")


MACHINE_CHECKS = (_check_torch, _check_gpus, _check_horovod, _check_shared_memory)


def examine() -> list[Finding]:
    """Return all findings about this machine."""
    # The programs of this Python environment come first: it need not be activated.
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    environ = {**os.environ, "PATH": path}
    probe = run((*TRIAL, "probe"), environ)
    shm = "/dev/shm"  # noqa: S108  # Linux has it here
    facts = {
        "probe": probe,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": _gpus(),
        "horovod": _horovod(),
        # total and free bytes
        "shared_memory": shutil.disk_usage(shm)[::2] if os.path.isdir(shm) else None,
    }
    code = (
        f"{_version.__version__} (code {_version.digest_of_code()}) in "
        f"{Path(_version.__file__).parent}"
    )
    findings = [
        Finding("python", "ok", f"{platform.python_version()} in {sys.prefix}"),
        Finding("hvd_train", "ok", code),
        *(check(facts) for check in MACHINE_CHECKS),
    ]
    horovodrun = shutil.which("horovodrun", path=path)
    controllers = [
        name
        for name in ("gloo", "mpi")
        if probe.get(name) and (name == "gloo" or shutil.which("mpirun", path=path))
    ]
    if horovodrun is None or not controllers:
        return findings
    launches = {
        f"horovodrun --{name}": (horovodrun, "-np", "2", f"--{name}") for name in controllers
    }
    findings += [run_trial(name, launch, 2, environ) for name, launch in launches.items()]
    if probe["nccl"] and probe["gpus"] >= 2:
        findings.append(
            run_trial("NCCL on 2 GPUs", next(iter(launches.values())), 2, environ, "cuda")
        )
    return findings


def _horovod() -> dict[str, Any] | None:
    """Describe the Horovod that `import horovod` would load, without importing it."""
    # a mere folder has no origin
    if (spec := importlib.util.find_spec("horovod")) is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    build = None
    with suppress(OSError, ValueError):
        # B4 puts it into the wheel
        build = json.loads((folder / "hvd_train_build.json").read_text(encoding="utf-8"))
    versions = [
        found.version for found in metadata.distributions(name="horovod", path=[str(folder.parent)])
    ]
    return {
        "folder": str(folder.parent),
        "version": versions[0] if versions else "of unknown version",
        "build": build,
    }


def _gpus() -> dict[str, Any]:
    if (program := shutil.which("nvidia-smi")) is None:
        return {"listed": []}
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return {
            "listed": subprocess.check_output(query, text=True, timeout=20).strip().splitlines()
        }
    except subprocess.SubprocessError as error:
        return {"listed": [], "error": first_line(getattr(error, "output", "") or error)}


def run(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Run a program that ends itself after `trial.LIMIT_S`; return its last answer,
    its seconds, and an "error".
    """
    started = time.monotonic()
    line = ["timeout", "--foreground", "--kill-after=5", f"{trial.LIMIT_S + 20}", *command]
    done = subprocess.run(
        line,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seconds = time.monotonic() - started
    output = done.stdout.decode(errors="replace")
    answers = re.findall(rf"{ANSWER}(\{{.*\}})", output)
    facts: dict[str, Any] = {**(json.loads(answers[-1]) if answers else {}), "seconds": seconds}
    if answers and done.returncode == 0:
        return facts
    lines = [line for line in output.splitlines() if line.strip() and ANSWER not in line]
    # Horovod logs why a rank could not connect; its exception only says so.
    causes = re.findall(r"\[(\d+)\]<stderr>:.* Horovod could not be initialized: (.*)", output)
    told = [f"rank {rank}: {why}" for rank, why in causes]
    error = [*told, *reasons(output), *lines, f"exit code {done.returncode}, without output"][0][
        :300
    ]
    if seconds >= trial.LIMIT_S:
        error = f"no end in {seconds:.0f} s"
    elif done.returncode < 0:
        error = f"killed by {signal.Signals(-done.returncode).name}"
    return {**facts, "error": error}


def check_trial(name: str, launch: Sequence[str], ranks: int, found: Facts) -> Finding:
    """Check that all ranks took part in an allreduce, that their sum is right, and that each
    rank computes rightly.
    """
    if "error" in found:
        command = " ".join([Path(launch[0]).name, *launch[1:], sys.executable])
        todo = (
            f"to see all it prints, type: NCCL_DEBUG=INFO {command} -c 'import "
            "horovod.torch as hvd; hvd.init()'"
        )
        return Finding(
            name,
            "broken",
            found["error"],
            f"{todo}; all TCP ports between hosts must be open; HOROVOD_GLOO_IFACE "
            "names the network card",
        )
    if found["size"] != ranks:
        what = f"the ranks did not find each other: world size {found['size']}, not {ranks}"
        return Finding(
            name, "broken", what, f"mpirun must be of the MPI in the line horovod; or {REBUILD}"
        )
    if found["sums"] != [ranks * (ranks + 1) / 2]:
        what = f"the sum of 1 to {ranks} is {', '.join(map(str, found['sums']))}"
        return Finding(
            name, "broken", what, f"do not train with this build; rebuild it: {REBUILD_AGAIN}"
        )
    if wrong := found["wrong"]:
        what = f"rank {wrong[0]}: its machine computes wrongly (convolutions of whole numbers)"
        return Finding(name, "broken", what, "do not train on this machine")
    return Finding(name, "ok", f"{ranks} ranks, the sum is right, {found['seconds']:.1f} s")


def run_trial(
    name: str, launch: Sequence[str], ranks: int, environ: Mapping[str, str], device: str = "cpu"
) -> Finding:
    """Run an allreduce over real ranks, which `launch` starts, and check its result."""
    return check_trial(name, launch, ranks, run([*launch, *TRIAL, device], environ))
