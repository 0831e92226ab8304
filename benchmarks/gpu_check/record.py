"""The record of a check: one JSON file that is whole after every finding, and the same as a table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.gpu_check.findings import Finding, verdict_of
from benchmarks.gpu_check.machine import Machine
from hvd_train.console import printable

NOT_ENDED = "not ended"
_COLOURS = {"passed": "green", "failed": "bold red", "not applicable": "yellow", NOT_ENDED: "bold red"}


class Record:
    """The stages so far. A check that is killed leaves what it has: the stage that it was in is `not ended`."""

    def __init__(self, path: Path, machine: Machine, options: Sequence[str]) -> None:
        self.path = path
        self.values: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.gpu_check", *options]),
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "commit": _commit(),
            "machine": machine.as_dict(),
            "verdict": NOT_ENDED,
            "stages": [],
        }
        self._write()

    def begin(self, stage: str) -> None:
        """Begin a stage."""
        self._began = time.monotonic()
        self.values["stages"].append({"stage": stage, "verdict": NOT_ENDED, "seconds": 0, "findings": []})
        self._write()

    def add(self, finding: Finding) -> None:
        """Add a finding to the stage that was begun last."""
        stage = self.values["stages"][-1]
        stage["findings"].append(dataclasses.asdict(finding))
        stage["seconds"] = round(time.monotonic() - self._began)
        self._write()

    def end(self) -> str:
        """End the stage that was begun last, and return its verdict."""
        stage = self.values["stages"][-1]
        stage["verdict"] = verdict_of(finding["verdict"] for finding in stage["findings"])
        stage["seconds"] = round(time.monotonic() - self._began)
        self._write()
        return str(stage["verdict"])

    def leave_out(self, stage: str, why: str) -> None:
        """Add a stage that cannot be made any more."""
        self.begin(stage)
        self.add(Finding(stage, "not applicable", why))
        self.end()

    def close(self) -> str:
        """Give the verdict on the whole check, and return it."""
        self.values["verdict"] = verdict_of(stage["verdict"] for stage in self.values["stages"])
        self._write()
        return str(self.values["verdict"])

    def table(self) -> Table:
        """Return a row for each stage and finding."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold", max_width=36)
        grid.add_column(overflow="fold")
        for stage in self.values["stages"]:
            grid.add_row(_coloured(stage["verdict"]), Text(stage["stage"], style="bold"), f"{stage['seconds']} s")
            for finding in stage["findings"]:
                name, what = printable(finding["name"]), printable(finding["what"])
                grid.add_row(_coloured(finding["verdict"]), Text(f"  {name}"), Text(what))
        return grid

    def _write(self) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def _coloured(verdict: str) -> Text:
    return Text(verdict, style=_COLOURS[verdict])


def _commit() -> str:
    """Return the commit of this checkout, or why there is none: it may have been carried here without its history."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no history here"
    return found.stdout.strip()
