"""The commands that start ranks: horovodrun, mpirun, srun, Apptainer and our elastic driver.

Pure Python, no packages.

Each function returns the words of a command, which `hvd-train launch` runs, or prints with
--dry-run.
"""

import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_train.console import say
from hvd_train.errors import UsageError
from hvd_train.launch import ssh
from hvd_train.launch.child import output_of
from hvd_train.launch.hosts import Host, printed_by

PASSED = "HVD_TRAIN_ENV"  # names of more variables for ranks on other hosts, with commas
# Nodes that do not answer, which Slurm marks with *, are left out, and so are nodes that are down
# or failing.
_NODES = (
    "found=$(sinfo --noheader --Node --nodes {nodes} --format '%N:{slots} %t') && "
    'echo "$found" | '
    "awk '$2 !~ /[*]|^down|^fail/ {{ print $1 }}' | sort -u"
)


def default_ranks(environ: Mapping[str, str]) -> int:
    """Return one rank for each GPU; without one 2, since more gain little on one
    machine, or 1 on a single core.
    """
    return num_gpus(environ) or min(2, len(os.sched_getaffinity(0)))


def num_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that this process may use, as CUDA and its driver list them."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(
            [device for device in re.split(r"(?:^|,)-", visible)[0].split(",") if device.strip()]
        )
    try:
        listed = output_of(["nvidia-smi", "--list-gpus"]).stdout
    except OSError:
        return 0
    return listed.count("\nGPU ") + listed.startswith("GPU ")


def program(name: str) -> str:
    """Return the path of a program next to this Python, or else on the PATH.

    Raises UsageError if there is none.
    """
    next_to_python = Path(sys.executable).with_name(name)
    found = str(next_to_python) if next_to_python.exists() else shutil.which(name)
    if found is None:
        raise UsageError(
            f"there is no {name} next to {sys.executable} or on the PATH: type `hvd-train doctor`"
        )
    return found


def shown(name: str) -> str:
    """Return the name of a program of this environment if the PATH leads to it, else its path."""
    path = program(name)
    found = shutil.which(name)
    return name if found and os.path.samefile(found, path) else path


def with_variables(variables: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return a command with more environment variables."""
    added = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *added, *words[words[:1] == ["env"] :]] if added else list(words)


def horovodrun(ranks: int, hosts: Sequence[Host], controller: str) -> list[str]:
    """Return the start of a horovodrun command ("gloo" or "mpi"); no `hosts` means this machine."""
    variables = _open_mpi("horovodrun") if controller == "mpi" else {}
    on = ["-H", ",".join(map(str, hosts))] if hosts else []
    return with_variables(
        variables, [shown("horovodrun"), "-np", str(ranks), *on, f"--{controller}"]
    )


def mpirun(ranks: int, hosts: Sequence[Host], environ: Mapping[str, str]) -> list[str]:
    """Return the start of a command of plain mpirun: of Open MPI 4 or 5, of MPICH or of Intel MPI.

    Raises UsageError if there is no mpirun, or another kind of it.
    """
    command = "mpirun" if shutil.which("mpirun") else program("mpirun")
    try:
        from horovod.runner.util import worker_environment
    except ImportError:
        raise UsageError("Horovod is not installed here: type `hvd-train doctor`") from None
    names = list(worker_environment.for_other_hosts(environ))
    others = [host.name for host in hosts if not ssh.is_here(host.name)]
    listed = ",".join(map(str, hosts))
    flags = shlex.split(environ.get("MPIRUN_FLAGS", ""))
    variables = {}
    version = output_of([command, "--version"])
    text = version.stdout + version.stderr
    if "Open MPI" in text:
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        flags += [word for name in names for word in ("-x", name)]
        # No binding to cores, because loader processes would share their rank's core. horovodrun
        # chooses ob1, too.
        flags += ["--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1"]
        ssh_options = shlex.join(ssh.options(*others, connect_s=10))
        if "Open MPI) 4." in text:
            variables = _open_mpi("mpirun")
            flags += [
                "--mca",
                "plm_rsh_args",
                ssh_options,
                *(["-x", "OPAL_PREFIX"] if variables else []),
            ]
        else:
            flags += ["--prtemca", "plm_ssh_args", ssh_options]
        flags += ["--host", listed] if hosts else []
    elif re.search(r"HYDRA|MPICH|Intel\(R\) MPI", text):
        flags += [
            "-bind-to",
            "none",
            *(["-hosts", listed] if hosts else []),
            "-genvlist",
            ",".join(names),
        ]
    else:
        raise UsageError(
            "this mpirun is neither Open MPI's nor MPICH's: "
            f"{text.strip().partition(os.linesep)[0]}"
        )
    return with_variables(variables, [command, "-np", str(ranks), *flags])


def under_mpirun(begin: Sequence[str], command: Sequence[str], hosts: Sequence[Host]) -> int:
    """Run `command` on each rank by the mpirun of `begin`; return the exit code of
    the first rank that fails.

    mpirun alone kills its ranks a second after a signal. Like `horovodrun --mpi`, this starts a
    small process beside each rank, which gives it `HVD_TRAIN_GRACE_SECONDS` to commit.
    """
    from horovod.runner import mpi_job
    from horovod.runner.common.util.outcome import JobFailedError

    ranks = int(begin[begin.index("-np") + 1])
    listed = ",".join(map(str, hosts)) or f"localhost:{ranks}"
    line = shlex.join([*begin, *mpi_job.guarded(list(command))])
    try:
        mpi_job.run_mpirun(line, os.environ, Namespace(num_proc=ranks, hosts=listed))
    except JobFailedError as error:
        say(f"mpirun: {error}")
        return int(error.exit_code)
    return 0


def _open_mpi(launcher: str) -> dict[str, str]:
    """Return where an Open MPI 4 in the Python environment of a launcher is on other
    hosts, whose PATH lacks it.
    """
    daemon = Path(shutil.which(launcher) or sys.executable).with_name("orted")
    if not (daemon.exists() and daemon.with_name("python").exists()):
        return {}
    variables = {
        "OPAL_PREFIX": str(daemon.parents[1]),
        "OMPI_MCA_orte_launch_agent": shlex.quote(str(daemon)),
    }
    return {name: value for name, value in variables.items() if not os.environ.get(name)}


def apptainer(image: str, gpus: int) -> list[str]:
    """Return the start of a command in a container of Apptainer, with the GPUs of its host."""
    return ["apptainer", "exec", *(["--nv"] if gpus else []), image]


def elastic(options: Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return the start of the command of an elastic job; it waits for --np workers, or
    for all that are listed now.

    Raises UsageError if there is no host file or no allocation of Slurm, or if its hosts have
    unknown names.
    """
    source = options.hosts
    nodes = environ.get("SLURM_JOB_NODELIST")
    if source is not None:
        if not os.path.isfile(source):
            raise UsageError(
                f"--elastic reads a host file while the job runs, and {source} is no file"
            )
        discover = f"cat {shlex.quote(str(Path(source).resolve()))}"
    elif options.discover or options.way != "slurm":
        discover = (
            options.discover
            or f"echo localhost:{options.max_np or options.np or default_ranks(environ)}"
        )
    elif nodes:
        discover = _NODES.format(
            nodes=shlex.quote(nodes), slots=environ.get("SLURM_GPUS_ON_NODE") or 1
        )
    else:
        raise UsageError(
            "there is no Slurm allocation here (SLURM_JOB_NODELIST is not set): type salloc first"
        )
    listed = printed_by(discover, source or f"the output of {discover}")
    if source and not options.dry_run:  # a command may print hosts that are only about to come
        ssh.check_names([host.name for host in listed])
    slots = sum(host.slots for host in listed)
    ranks = options.np or max(min(slots, options.max_np or slots), options.min_np)
    python = shown("python")
    words = [
        python,
        "-m",
        "hvd_train.elastic.driver",
        "-np",
        str(ranks),
        "--min-np",
        str(options.min_np),
    ]
    words += ["--host-discovery-script", discover]
    return words + (["--max-np", str(options.max_np)] if options.max_np else [])
