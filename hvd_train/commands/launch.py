"""`hvd-train launch ... -- COMMAND`: start the ranks of a training: here, over
ssh, under Slurm, in Docker.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from hvd_train import recipes
from hvd_train.commands import tree
from hvd_train.console import PROGRAM, say, show
from hvd_train.errors import UsageError, unknown_name
from hvd_train.launch import client, containers, hosts, ssh, start
from hvd_train.launch.child import STOPPING, Child


def launch(options: Namespace) -> int:
    """Start the command; return its exit code, unless this process becomes it.

    Raises UsageError before it starts.
    """
    words = options.command[options.command[:1] == ["--"] :]
    _check(options)
    passed = _pass_on(options.env)
    if options.way == "docker":  # the launcher runs in the container of this host
        inner = [
            PROGRAM,
            "launch",
            "--hosts",
            containers.HOST_FILE,
            *(["--elastic"] if options.elastic else []),
        ]
        inner += [word for name in options.env for word in ("--env", name)]
        return containers.run(hosts.named(options.hosts), options, [*inner, "--", *words])
    command = _command(words, str if options.image or options.way == "apptainer" else start.shown)
    if options.requeue:
        command = _in_one_folder(command)
    begin = start.with_variables(passed, _begin(options, command[0]))
    line = [*begin, *command]
    if options.dry_run:
        show(shlex.join(line))
        return 0
    if options.way == "slurm" and not options.elastic:
        return _in_slurm(line, in_batch=options.requeue)
    if options.way == "mpirun":
        return start.under_mpirun(begin, command, hosts.named(options.hosts))
    sys.stdout.flush()
    os.execvp(line[0], line)  # noqa: S606  # this process becomes the launcher
    raise AssertionError


def _begin(options: Namespace, program: str) -> list[str]:
    """Return the start of the command that starts `program` on all
    ranks, once all hosts have it.
    """
    if options.elastic:
        return start.elastic(options, os.environ)
    if options.way == "slurm":
        # Not with --kill-on-bad-exit: rank 0 may still write when the other ranks have committed
        # and ended.
        tasks = ["--ntasks", str(options.np)] if options.np else []  # or all of the allocation
        return ["srun", *tasks, *(start.apptainer(options.image, 1) if options.image else [])]
    listed = hosts.named(options.hosts)
    slots = sum(host.slots for host in listed)
    ranks = options.np or slots or start.default_ranks(os.environ)
    if listed and ranks > slots:
        raise UsageError(f"--np {ranks}: {options.hosts} has {slots} slots")
    if options.way == "apptainer":
        begin = start.apptainer(options.image or "hvd_train.sif", start.num_gpus(os.environ))
        return [*begin, "horovodrun", "-np", str(ranks), "--gloo"]
    if not options.dry_run:
        ssh.check([host.name for host in listed], shutil.which(program) or program)
    if options.way == "mpirun":
        return start.mpirun(ranks, listed, os.environ)
    return start.horovodrun(ranks, listed, options.way)


def _pass_on(names: Sequence[str]) -> dict[str, str]:
    """Let ranks on other hosts get more variables of this environment; return
    the variable that says so.

    Values must not be typed, because every user can read command lines. Raises UsageError for one
    that is missing.
    """
    if not os.environ.keys() >= set(names):  # one may hold a value, which must not be printed
        raise UsageError("--env takes the name of a variable, whose value is in the environment")
    passed = (
        {start.PASSED: ",".join(filter(None, [os.environ.get(start.PASSED), *names]))}
        if names
        else {}
    )
    os.environ |= passed
    return passed


def _check(options: Namespace) -> None:
    """Raise UsageError for options that do not go together."""
    way = options.way
    if options.elastic and way not in ("gloo", "slurm", "docker"):
        raise UsageError(
            f"--elastic does not go with --with {way}: MPI and a fixed image cannot start again"
        )
    if options.max_np and options.max_np < options.min_np:
        raise UsageError(f"--max-np {options.max_np} is less than --min-np {options.min_np}")
    if not options.elastic and (options.min_np > 1 or options.max_np or options.discover):
        raise UsageError("--min-np, --max-np and --discover are for --elastic: add it")
    if options.hosts is not None and (options.discover or way in ("slurm", "apptainer")):
        other = "--discover" if options.discover else f"--with {way}"
        raise UsageError(
            f"--hosts does not go with {other}, which chooses the hosts: leave one out"
        )
    if way == "docker" and options.hosts is None:
        raise UsageError(
            "--with docker needs --hosts FILE; on this machine alone: docker run --rm hvd_train"
        )


def _command(words: Sequence[str], shown: Callable[[str], str]) -> list[str]:
    """Return the command of each rank: hvd-train for its commands, recipes and
    flags, a script, or a program.

    `shown` gives the word for a program. Raises UsageError for an unknown one, and for wrong
    settings.
    """
    first = words[0] if words else ""
    if first.endswith(".py"):
        return [shown("python"), *words]
    if first == PROGRAM:
        return _command(words[1:], shown)
    if not first or first.startswith("-") or first in recipes.RECIPES:
        words = ["train", *words]
        first = "train"
    ranked = [name.split()[0] for name in tree.RANKED]
    if first in ranked:
        if first == "train":
            options = tree.read(words)
            if options.np or options.hosts:
                raise UsageError("--np and --hosts are for launch: type them before `--`")
            # The first host of a job in containers may have no package, not even yaml.
            from hvd_train.commands.train import settings_of

            settings_of(options, notes=False)  # rank 0 prints them
        return [shown(PROGRAM), *words]
    if os.sep not in first:
        try:
            return [shown(first), *words[1:]]
        except UsageError:
            raise unknown_name("command", first, (*ranked, *recipes.RECIPES, "python")) from None
    return list(words)


def _in_one_folder(command: list[str]) -> list[str]:
    """Let a batch job write into the same folder each time it leaves the
    queue, so that it resumes.
    """
    if any(word.partition("=")[0] in ("--output-dir", "--resume") for word in command):
        return command
    return [*command, "--output-dir", f"runs/slurm-{os.environ.get('SLURM_JOB_ID', 'JOB')}"]


def _in_slurm(line: Sequence[str], *, in_batch: bool) -> int:
    """Run srun; put a batch job whose training stopped with a commit back into the queue."""
    if not (job := os.environ.get("SLURM_JOB_ID")):
        raise UsageError(
            "there is no Slurm allocation here: type salloc or sbatch, with --nodes "
            "and --ntasks-per-node"
        )
    # In a batch job SIGUSR1 comes to this process alone (--signal=B:USR1), and SIGTERM to the
    # tasks, too.
    child = Child(
        {**STOPPING, signal.SIGUSR1: signal.SIGUSR1, **({signal.SIGTERM: 0} if in_batch else {})}
    )
    # Slurm gives the key by which the ranks know one another to the tasks.
    code = child.run(line, {client.KEY: os.environ.get(client.KEY) or secrets.token_hex(32)})
    if in_batch and code in (75, 138, 143):  # stopped before the end, and committed
        say("committed; back into the queue")
        subprocess.run(["scontrol", "requeue", job])
    return code
