"""What this machine and this build of Horovod can do, finding by finding, each with what to type.

`examine` collects the facts; `findings` and `horovod_findings` judge them. None of these imports torch or Horovod:
child processes do (see `questions`), so that a build which cannot be loaded is a line of the table as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from hvd_train import _version
from hvd_train.doctor import questions
from hvd_train.doctor.children import children
from hvd_train.doctor.findings import (
    Facts,
    Finding,
    check_gpus,
    check_hvd_train,
    check_jpeg,
    check_machine,
    check_python,
    check_torch,
    check_torchvision,
)
from hvd_train.doctor.gpu_code import BUILD_FILE
from hvd_train.doctor.horovod_findings import (
    REBUILD_AGAIN,
    Installed,
    check_gloo,
    check_gpu_code,
    check_horovod,
    check_import,
    check_mpi,
    check_mpi4py,
    check_nccl,
    check_patches,
    check_trial,
    trials,
)

QUESTION_LIMIT_S, ALLREDUCE_LIMIT_S = 60.0, 60.0


def examine(say: Callable[[str], None] = lambda _: None, *, quick: bool) -> list[Finding]:
    """Return all findings about this machine; `say` shows what is being done. What is slow runs side by side.

    `quick` leaves out the allreduces.
    """
    installed = find_horovod()
    path = search_path(installed, os.environ)
    with children({**os.environ, "PATH": path}) as group:
        python = sys.executable
        programs = ("horovodrun", "mpirun", "nvidia-smi")
        horovodrun, mpirun, nvidia_smi = (shutil.which(program, path=path) for program in programs)
        say("importing torch and Horovod")
        commands = {"torch": [python, "-c", questions.TORCH], "mpi4py": [python, "-c", questions.MPI4PY]}
        if installed:
            commands["horovod"] = [python, "-c", questions.HOROVOD]
        if mpirun:
            commands["mpirun"] = [mpirun, "--version"]
        if nvidia_smi:
            commands["smi"] = [nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        started = {name: group.start(command, QUESTION_LIMIT_S) for name, command in commands.items()}
        outcomes = {name: child.outcome() for name, child in started.items()}
        torch, mpi4py = questions.answer(outcomes["torch"]), questions.answer(outcomes["mpi4py"])
        horovod = questions.answer(outcomes["horovod"]) if installed else {}
        findings = [
            check_python(sys.version_info[:3], sys.prefix),
            check_hvd_train(_version.__version__, Path(_version.__file__).parent),
            check_torch(torch),
            *([check_torchvision(torch), check_jpeg(torch)] if "version" in torch else []),
            check_gpus(torch, outcomes.get("smi"), os.environ.get("CUDA_VISIBLE_DEVICES")),
            check_nccl(torch, horovod),
            check_horovod(installed),
            *check_gpu_code(installed, torch),
        ]
        if installed:
            findings += [check_import(installed, torch, horovod), check_patches(installed)]
            findings += [check_gloo(horovod)] if "gloo" in horovod else []
        findings += [
            check_mpi(mpirun, outcomes.get("mpirun"), horovod),
            check_mpi4py(mpi4py, horovod),
            *check_machine(torch),
        ]
        if "gloo" in horovod and not quick:
            for trial in trials(horovodrun, mpirun, outcomes.get("mpirun"), horovod, len(torch.get("gpus", ()))):
                say(f"allreduce on 2 ranks: {trial.name}")
                command = [*trial.launch, python, "-c", questions.ALLREDUCE, trial.device]
                findings.append(check_trial(trial, group.start(command, ALLREDUCE_LIMIT_S).outcome()))
            if not horovodrun:
                todo = f"it belongs beside {python}; {REBUILD_AGAIN}"
                findings.append(Finding("horovodrun", "broken", "the program is not there", todo))
    return findings


def find_horovod() -> Installed | None:
    """Return the installed Horovod and what its files say about it, without importing it; None where there is none."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:  # without an origin it is any folder of that name
        return None
    folder = Path(spec.origin).parent
    build = read_json(folder / BUILD_FILE)
    versions = [found.version for found in metadata.distributions(name="horovod", path=[str(folder.parent)])]
    torch = (build or {}).get("torch") or (read_json(folder / "metadata.json") or {}).get("pytorch")
    return Installed(folder, versions[0] if versions else "of unknown version", build, str(torch or ""))


def read_json(path: Path) -> Facts | None:
    """Return the JSON object in a file, or None where there is none or the file cannot be read."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def search_path(installed: Installed | None, environ: Mapping[str, str]) -> str:
    """Return the PATH for programs: that of `environ`, and the folder where this Python environment has its own.

    So the environment need not be activated. Its folder comes first, unless Horovod was built with the machine's MPI:
    the machine's mpirun must start it.
    """
    own = sysconfig.get_path("scripts")
    build = installed.build if installed else None
    machines_mpi = bool(build and build.get("mpi") and not str(build["mpi"]).endswith("(package index)"))
    path = environ.get("PATH", os.defpath)
    return os.pathsep.join((path, own) if machines_mpi else (own, path))
