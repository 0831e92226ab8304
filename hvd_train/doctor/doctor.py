"""`hvd-train doctor`: what this machine and this build of Horovod can do, line by line, each with what to type.

`examine` collects the facts; `findings` and `horovod_findings` judge them. None of these imports torch or Horovod:
child processes do (see `probe`), so that a build which cannot be loaded is a line of the table as well.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd_train import _version
from hvd_train.doctor import cluster, probe
from hvd_train.doctor.findings import (
    Facts,
    Finding,
    Verdict,
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
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.launch import hosts, launcher
from hvd_train.launch.hosts import Host

RECORD = "hvd_train_build.json"  # what packaging/build_horovod.py puts into the wheel
PROBE_LIMIT_S, ALLREDUCE_LIMIT_S = 60.0, 60.0
_COLOURS = {"ok": "green", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class DoctorOptions:
    """What this machine and this build of Horovod can do, with a real allreduce over two ranks."""

    json: bool = False
    """Print one JSON object."""
    quick: bool = False
    """Leave out the allreduces."""
    hosts: Path | None = None
    """Examine the hosts of this host file, from the first of them, over ssh."""
    host_list: str | None = None
    """The same for a list, as in -H h1:2,h2:2 or -H node[01-04]:8."""
    data_dir: Path | None = None
    """With hosts: a folder that must be on all of them, with the same files."""


def main(arguments: list[str]) -> int:
    """Examine this machine, print the findings; 0 when nothing is broken, otherwise 1.

    Raises UsageError inside a launched group: the doctor starts launchers of its own.
    """
    options = parse_flags(DoctorOptions, ["--host-list" if a == "-H" else a for a in arguments], "hvd-train doctor")
    listed = _listed(options)
    if launched := launcher.launched(os.environ):
        raise UsageError(
            f"the doctor starts its ranks itself, but {launched.launcher} has started this process: "
            "type `hvd-train doctor` without a launcher"
        )
    console = Console(highlight=False)
    with _ended_by_sigterm(), Console(stderr=True).status("looking") as status:

        def say(doing: str) -> None:
            status.update(Text(doing))

        if listed:
            findings = cluster.examine(listed, options.data_dir, quick=options.quick, say=say)
        else:
            findings = examine(options, say)
    if options.json:
        print(json.dumps(as_dict(findings, options), indent=1))
    else:
        console.print(table(findings))
        console.print(Text(sentence(findings, options)))
    return 1 if _named(findings, "broken") else 0


# ------------------------------------------------------------------------------------------------------ the examination


def examine(options: DoctorOptions, say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """All findings about this machine; `say` is told what is being done. What is slow runs side by side."""
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
        if "gloo" in horovod and not options.quick:
            for trial in trials(horovodrun, mpirun, ran.get("mpirun"), horovod, len(torch.get("gpus", ()))):
                say(f"allreduce on 2 ranks: {trial.name}")
                command = commands.start([*trial.words, python, "-c", probe.ALLREDUCE, trial.device], ALLREDUCE_LIMIT_S)
                findings.append(check_trial(trial, command.result()))
            if not horovodrun:
                todo = f"it belongs beside {python}; {REBUILD_AGAIN}"
                findings.append(Finding("horovodrun", "broken", "the program is not there", todo))
    return findings


def _listed(options: DoctorOptions) -> tuple[Host, ...]:
    if options.hosts is not None and options.host_list is not None:
        raise UsageError("--hosts and -H: give one of them")
    if options.hosts is not None:
        return hosts.read(options.hosts)
    if options.host_list is not None:
        return hosts.parse(options.host_list)
    if options.data_dir is not None:
        raise UsageError("--data-dir goes with --hosts or -H")
    return ()


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


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that the child processes are ended."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------------------------- the telling


def table(findings: list[Finding]) -> Table:
    """A line for each finding, what to do below it; text wraps and nothing is cut off."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.what)
        if finding.todo:
            text.append(f"\n-> {finding.todo}", style="bold")
        grid.add_row(Text(finding.verdict, style=_COLOURS[finding.verdict]), finding.name, text)
    return grid


def sentence(findings: list[Finding], options: DoctorOptions) -> str:
    """The whole in one sentence."""
    broken, warned = _named(findings, "broken"), _named(findings, "warning")
    untried = " No allreduce was tried." if options.quick else ""
    if broken:
        also = f"; warnings: {', '.join(warned)}" if warned else ""
        return f"Broken: {', '.join(broken)}{also}."
    if warned:
        return f"Nothing is broken; warnings: {', '.join(warned)}.{untried}"
    return f"All is well.{untried}"


def as_dict(findings: list[Finding], options: DoctorOptions) -> dict[str, Any]:
    """The same for programs."""
    return {
        "ok": not _named(findings, "broken"),
        "verdict": sentence(findings, options),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _named(findings: list[Finding], verdict: Verdict) -> list[str]:
    return [finding.name for finding in findings if finding.verdict == verdict]
