"""`hvd-train doctor`: what this machine, this build of Horovod and a cluster can do."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hvd_train.console import PROGRAM, printable, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.launch import hosts, launcher

if TYPE_CHECKING:
    from rich.table import Table

    from hvd_train.doctor.findings import Finding, Verdict

USAGE = """\
  doctor [--hosts FILE]    what this machine, or a whole cluster, can do
"""
_COLOURS = {"ok": "green", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class DoctorOptions:
    """Examine what this machine and this build of Horovod can do, or a whole cluster.

    Each line that is not ok says what to type.
    """

    json: bool = False
    """Print one JSON object."""
    quick: bool = False
    """Leave out the allreduces."""
    hosts: Path | None = None
    """Examine the hosts of this host file, from the first of them, over ssh."""
    host_list: str | None = None
    """Examine the hosts of this list, as in -H h1:2,h2:2 or -H node[01-04]:8."""
    data_dir: Path | None = None
    """With hosts: a folder that must be on all of them, with the same files."""


def run(arguments: list[str]) -> int:
    """Examine the machine or the cluster, print the findings and return 1 where something is broken, else 0.

    Raises UsageError inside a launched group, since the doctor starts launchers of its own.
    """
    arguments = ["--host-list" if argument == "-H" else argument for argument in arguments]
    options = parse_flags(DoctorOptions, arguments, f"{PROGRAM} doctor")
    cluster_hosts = _hosts(options)
    if launched := launcher.launched(os.environ):
        raise UsageError(
            f"the doctor starts its ranks itself, but {launched.launcher} has started this process: "
            f"type `{PROGRAM} doctor` without a launcher"
        )
    from rich.console import Console  # slow to import, and so is the room
    from rich.text import Text

    from hvd_train.doctor import cluster, doctor

    console = Console(highlight=False)
    with _ended_by_sigterm(), Console(stderr=True).status("looking") as status:

        def say(doing: str) -> None:
            status.update(Text(doing))

        if cluster_hosts:
            findings = cluster.examine(cluster_hosts, options.data_dir, quick=options.quick, say=say)
        else:
            findings = doctor.examine(say, quick=options.quick)
    if options.json:
        print(json.dumps(as_dict(findings, quick=options.quick), indent=1))
    else:
        console.print(table(findings))
        show(sentence(findings, quick=options.quick))
    return 1 if _names(findings, "broken") else 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train doctor", "hvd-train doctor --hosts hostfiles/two_hosts --data-dir DATA")
    return page_of(DoctorOptions, "doctor [FLAGS]", examples, aliases={"--host-list": ("-H",)})


def _hosts(options: DoctorOptions) -> tuple[hosts.Host, ...]:
    """Return the hosts to examine; none means this machine. Raises UsageError for flags that contradict each other."""
    if options.hosts is not None and options.host_list is not None:
        raise UsageError("--hosts and -H: give one of them")
    if options.hosts is not None:
        return hosts.read(options.hosts)
    if options.host_list is not None:
        return hosts.parse(options.host_list)
    if options.data_dir is not None:
        raise UsageError("--data-dir goes with --hosts or -H")
    return ()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the child processes are ended."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(findings: list[Finding]) -> Table:
    """Lay the findings out for a terminal: one row each, with its advice below; text wraps and nothing is cut off.

    What other hosts and programs have said is in them.
    """
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        text = Text(printable(finding.what, keep="\n\t"))
        if finding.todo:
            text.append(f"\n-> {printable(finding.todo)}", style="bold")
        name = Text(printable(finding.name))
        grid.add_row(Text(finding.verdict, style=_COLOURS[finding.verdict]), name, text)
    return grid


def sentence(findings: list[Finding], *, quick: bool) -> str:
    """Sum the findings up in one sentence; `quick` says that no allreduce was tried."""
    broken, warned = _names(findings, "broken"), _names(findings, "warning")
    untried = " No allreduce was tried." if quick else ""
    if broken:
        also = f"; warnings: {', '.join(warned)}" if warned else ""
        return f"Broken: {', '.join(broken)}{also}."
    if warned:
        return f"Nothing is broken; warnings: {', '.join(warned)}.{untried}"
    return f"All is well.{untried}"


def as_dict(findings: list[Finding], *, quick: bool) -> dict[str, Any]:
    """Return the findings as plain values for `--json`."""
    return {
        "ok": not _names(findings, "broken"),
        "verdict": sentence(findings, quick=quick),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _names(findings: list[Finding], verdict: Verdict) -> list[str]:
    return [finding.name for finding in findings if finding.verdict == verdict]
