"""`hvd-train train --np N` and `--hosts FILE`: this process becomes the horovodrun that starts the ranks. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError
from hvd_train.flags import take, take_number
from hvd_train.help_page import Flag
from hvd_train.launch import horovodrun, hosts, launcher, roll_call, ssh

CONTROLLERS = ("gloo", "mpi")
FLAGS = (
    Flag(("--np", "-np"), "N", "Start N ranks; by default one process trains, or a rank for each slot of --hosts."),
    Flag(
        ("--hosts",), "FILE", "Start them over ssh on the hosts of this file, which has a line `NAME slots=N` for each."
    ),
    Flag(("--controller",), "|".join(CONTROLLERS), "How ranks find one another, and sum on CPUs. (default: gloo)"),
)


@dataclass(frozen=True)
class Ranks:
    """Ranks to start: how many, the file of the hosts where (None for this machine), and by which controller."""

    count: int
    host_file: Path | None
    controller: str


def take_ranks(arguments: list[str], environ: Mapping[str, str]) -> tuple[Ranks | None, list[str]]:
    """Take the flags that start ranks out of the arguments; return the ranks, or None where none are to be started.

    Raises UsageError for numbers and host files that cannot be, and where a launcher has started this process already.
    """
    file, rest = take(arguments, "--hosts", "a host file")
    controller, rest = take(rest, "--controller", "gloo or mpi")
    number, _ = take(rest, "--np", "a number")
    typed = {"--np": number, "--hosts": file, "--controller": controller}
    flag = next((flag for flag, value in typed.items() if value is not None), None)
    if flag is None:
        return None, arguments
    refuse_in_ranks(flag, environ)
    if controller not in (None, *CONTROLLERS):
        raise UsageError(f"--controller {controller}: it must be {' or '.join(CONTROLLERS)}")
    if flag == "--controller":
        raise UsageError("--controller says how ranks find one another: add --np N or --hosts FILE, which start them")
    slots = None if file is None else sum(host.slots for host in hosts.read(Path(file)))
    count, rest = take_number(rest, "--np", slots or 1)
    if slots is not None and count > slots:
        raise UsageError(f"--np {count}: {file} has slots for {slots}; leave out --np to start a rank for each of them")
    return Ranks(count, None if file is None else Path(file), controller or CONTROLLERS[0]), rest


def become_launcher(ranks: Ranks, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the horovodrun that starts `hvd-train` with these arguments as the ranks.

    Raises UsageError where a program is missing, and where a host is unknown or does not let us in.
    """
    program = horovodrun.program(PROGRAM)
    file = None if ranks.host_file is None else str(ranks.host_file)
    line = [*horovodrun.line(ranks.count, file, ranks.controller), program, *arguments]
    launchers_environ = {"HVD_TRAIN_OUTPUT_PREFIX": "errors", **environ}
    if ranks.host_file is not None:
        found = hosts.read(ranks.host_file)
        used = [host for number, host in enumerate(found) if sum(h.slots for h in found[:number]) < ranks.count]
        if problems := ssh.problems([host.name for host in used], Path(program)):
            raise UsageError("\n".join(problems))
        launchers_environ[roll_call.HOSTS] = ",".join(f"{host.name}:{host.slots}" for host in found)
    beside = str(Path(sys.executable).parent)  # of mpirun, which horovodrun looks up by its name
    launchers_environ["PATH"] = f"{beside}:{environ.get('PATH', os.defpath)}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(line[0], line, launchers_environ)  # noqa: S606  # signals and the exit code are then horovodrun's own


def refuse_in_ranks(what: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError where this process, in which `what` is to start ranks, is a rank of a launcher itself."""
    launcher.check(environ, [PROGRAM, "train"])
    launched = launcher.launched(environ)
    if launcher.elastic(environ):
        of_whom = "an elastic job"
    elif launched is not None and (launched.launcher, launched.size) != ("srun", 1):  # as in `srun --pty bash`
        of_whom = launched.launcher
    else:
        return
    raise UsageError(f"{what} starts ranks, and this process is a rank of {of_whom} already: leave out one of the two")
