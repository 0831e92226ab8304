"""Where the stages work: a folder, commands with a limit of time, and the output of each in a file."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.findings import Failed, NotApplicable
from benchmarks.gpu_check.machine import Machine
from hvd_train.doctor import questions
from hvd_train.doctor.children import Child, Children

PROGRAMS = Path(sys.executable).parent
JOBS = "benchmarks.gpu_check.jobs"
ANSWER = "gpu-check: "


@dataclass
class Site:
    """What all stages have in common."""

    machine: Machine
    folder: Path
    group: Children
    minutes: float
    """That a stage may take."""
    short: bool
    """Whether everything is as small as it can be: to try the check itself, not the GPU."""
    _end: float = field(default=0.0)

    def begin_stage(self) -> None:
        """Start the clock of a stage."""
        self._end = time.monotonic() + 60 * self.minutes

    def seconds_left(self) -> float:
        """Return the seconds that the stage has. Raises NotApplicable where its time is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise NotApplicable(f"the {self.minutes:g} minutes of the stage were over")
        return left

    def needs_ranks(self, count: int) -> None:
        """Raise NotApplicable where so many ranks cannot be started."""
        if self.machine.most_ranks < count:
            raise NotApplicable(f"it takes {count} ranks; here {self.machine.about_ranks}")

    def worlds(self) -> list[int]:
        """Return the numbers of ranks to train with: 2, 4 and as many as there can be; 1 where there can be no more."""
        most = self.machine.most_ranks
        return sorted({min(ranks, most) for ranks in ((2,) if self.short else (2, 4, most))})

    def launched(self, ranks: int, *command: str) -> list[str]:
        """Return the command that starts another on so many ranks of the hosts of the check."""
        hosts = ["--hostfile", str(self.machine.host_file)] if self.machine.host_file else []
        return ["horovodrun", "--gloo", "-np", str(ranks), *hosts, *command]

    def start(self, command: Sequence[str], limit_s: float, variables: Mapping[str, str]) -> Child:
        """Start a command in the folder. Raises NotApplicable where the stage's time is over."""
        limit_s = min(limit_s, self.seconds_left())
        settings = {**self.machine.variables, **variables}
        here = ["env", "-C", str(self.folder), *(f"{name}={value}" for name, value in settings.items())]
        return self.group.start([*here, *command], limit_s)

    def run(self, name: str, command: Sequence[str], *, limit_s: float = 300, **variables: str) -> str:
        """Run a command to its end and return its output, which also goes to NAME.log.

        Raises Failed where it fails or takes longer than `limit_s`, NotApplicable where the stage's time is over.
        """
        outcome = self.start(command, limit_s, variables).outcome()
        log = self.folder / f"{name}.log"
        log.write_text(outcome.output, encoding="utf-8")
        if outcome.code is None:
            raise Failed(f"no end in {outcome.seconds:.0f} s; {log}")
        if outcome.code != 0:
            raise Failed(f"exit code {outcome.code}: {questions.first_error(outcome.output)}; {log}")
        return outcome.output

    def job(self, name: str, ranks: int, *arguments: str, limit_s: float = 300, **variables: str) -> list[Any]:
        """Run a job of `benchmarks.gpu_check.jobs` on so many ranks and return the answer of each that gave one."""
        command = self.launched(ranks, sys.executable, "-m", f"{JOBS}.{name}", *arguments)
        return answers(self.run(name, command, limit_s=limit_s, **variables))

    def measured(self, name: str, command: Sequence[str], limit_s: float = 300) -> dict[str, Any]:
        """Run a `bench` with --json and return its record. Raises as `run` does."""
        record = self.folder / f"{name}.json"
        self.run(name, [*command, "--json", record.name], limit_s=limit_s)
        values: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return values


def answers(output: str) -> list[Any]:
    """Return what the ranks of a job have answered, in the order of their lines."""
    return [json.loads(text) for text in re.findall(rf"{ANSWER}(.*)$", output, re.MULTILINE)]
