"""What this machine and this build of Horovod can do, finding by finding, each with what to type.

`examine` collects the facts; `findings` and `horovod_findings` judge them. None of these imports torch or Horovod:
child processes do (see `probe`), so that a build which cannot be loaded is a line of the table as well.
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
from hvd_train.doctor import probe
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
from hvd_train.doctor.horovod_findings import (
    REBUILD_AGAIN,
    Installed,
    check_gloo,
    check_horovod,
    check_import,
    check_mpi,
    check_mpi4py,
    check_nccl,
    check_patches,
    check_trial,
    trials,
)

RECORD = "hvd_train_build.json"  # what packaging/build_horovod.py puts into the wheel
PROBE_LIMIT_S, ALLREDUCE_LIMIT_S = 60.0, 60.0


def examine(say: Callable[[str], None] = lambda _: None, *, quick: bool) -> list[Finding]:
    """Return all findings about this machine; `say` shows what is being done. What is slow runs side by side.

    `quick` leaves out the allreduces.
    """
    installed = find_horovod()
    path = search_path(installed, os.environ)
    with probe.commands({**os.environ, "PATH": path}) as commands:
        python = sys.executable
        programs = ("horovodrun", "mpirun", "nvidia-smi")
        horovodrun, mpirun, nvidia_smi = (shutil.which(program, path=path) for program in programs)
        say("importing torch and Horovod")
        questions: dict[str, list[str | Path]] = {"torch": [python, "-c", probe.TORCH]}
        if installed:
            questions["horovod"] = [python, "-c", probe.HOROVOD]
        questions["mpi4py"] = [python, "-c", probe.MPI4PY]
        if mpirun:
            questions["mpirun"] = [mpirun, "--version"]
        if nvidia_smi:
            questions["smi"] = [nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        asked = {name: commands.start(words, PROBE_LIMIT_S) for name, words in questions.items()}
        ran = {name: command.result() for name, command in asked.items()}
        torch, mpi4py = probe.answer(ran["torch"]), probe.answer(ran["mpi4py"])
        horovod = probe.answer(ran["horovod"]) if installed else {}
        findings = [
            check_python(sys.version_info[:3], sys.prefix),
            check_hvd_train(_version.__version__, Path(_version.__file__).parent),
            check_torch(torch),
            *([check_torchvision(torch), check_jpeg(torch)] if "version" in torch else []),
            check_gpus(torch, ran.get("smi"), os.environ.get("CUDA_VISIBLE_DEVICES")),
            check_nccl(torch, horovod),
            check_horovod(installed),
        ]
        if installed:
            findings += [check_import(installed, torch, horovod), check_patches(installed)]
            findings += [check_gloo(horovod)] if "gloo" in horovod else []
        findings += [
            check_mpi(mpirun, ran.get("mpirun"), horovod),
            check_mpi4py(mpi4py, horovod),
            *check_machine(torch),
        ]
        if "gloo" in horovod and not quick:
            for trial in trials(horovodrun, mpirun, ran.get("mpirun"), horovod, len(torch.get("gpus", ()))):
                say(f"allreduce on 2 ranks: {trial.name}")
                command = commands.start([*trial.words, python, "-c", probe.ALLREDUCE, trial.device], ALLREDUCE_LIMIT_S)
                findings.append(check_trial(trial, command.result()))
            if not horovodrun:
                todo = f"it belongs beside {python}; {REBUILD_AGAIN}"
                findings.append(Finding("horovodrun", "broken", "the program is not there", todo))
    return findings


def find_horovod() -> Installed | None:
    """The installed Horovod and what it says about itself, without importing it."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:  # without an origin it is any folder of that name
        return None
    folder = Path(spec.origin).parent
    record = read_json(folder / RECORD)
    versions = [found.version for found in metadata.distributions(name="horovod", path=[str(folder.parent)])]
    told = (record or {}).get("torch") or (read_json(folder / "metadata.json") or {}).get("pytorch")
    return Installed(folder, versions[0] if versions else "of unknown version", record, str(told or ""))


def read_json(path: Path) -> Facts | None:
    """The JSON object in a file; None where there is none."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def search_path(installed: Installed | None, environ: Mapping[str, str]) -> str:
    """Where programs are looked for: the PATH and, for an environment that is not activated, its own folder.

    Its own comes first unless Horovod was built with the machine's MPI, whose mpirun must start it then.
    """
    own = sysconfig.get_path("scripts")
    record = installed.record if installed else None
    machines = bool(record and record.get("mpi") and not str(record["mpi"]).endswith("(package index)"))
    path = environ.get("PATH", os.defpath)
    return os.pathsep.join((path, own) if machines else (own, path))
