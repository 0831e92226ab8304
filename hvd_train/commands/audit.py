"""`hvd-train audit`: check that every sample counted exactly once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train.console import PROGRAM, show
from hvd_train.flags import parse_flags
from hvd_train.run_files import ledger

USAGE = "  audit RUN                check that every sample counted exactly once (of a run with --ledger)\n"


@dataclass(frozen=True)
class AuditOptions:
    """Check in ledger.jsonl that every sample counted exactly once in each finished epoch; exit code 1 if not."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder of a training with --ledger."""


def run(arguments: list[str]) -> int:
    """Print the verdict; return 0 if every sample counted exactly once, else 1. Raises UsageError without a ledger."""
    verdict = ledger.audit(parse_flags(AuditOptions, arguments, f"{PROGRAM} audit").run)
    show(verdict)
    return 1 if verdict.faults else 0
