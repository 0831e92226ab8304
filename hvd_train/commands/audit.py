"""`hvd-train audit`: check that every sample counted exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.run_files import ledger

USAGE = """\
  audit RUN                check that every sample counted exactly once
"""


@dataclass(frozen=True)
class AuditOptions:
    """Check that every sample counted exactly once in each finished epoch of a run with --ledger.

    The exit code is 1 if not.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder of a training with --ledger."""


def run(arguments: list[str]) -> int:
    """Print the verdict; return 0 where every sample counted exactly once, else 1.

    Raises UsageError where the folder holds no ledger that can be read.
    """
    options = parse_flags(AuditOptions, arguments, f"{PROGRAM} audit")
    if not options.run.is_dir():
        raise UsageError(f"{options.run}: no such run folder")
    verdict = ledger.audit(options.run)
    show(verdict)
    return 1 if verdict.faults else 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train audit runs/NAME",)
    return page_of(AuditOptions, "audit RUN", examples, "RUN")
