"""Profile chosen steps (`--profile STEPS`): each rank writes a trace,
and rank 0 shows a summary.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from hvd_train.console import say
from hvd_train.progress.clock import TrainingClock
from hvd_train.run_files import durable
from hvd_train.run_files.journal import Journal

_LARGEST = 10  # rows of the summary, and characters of a name in it
_NAME_WIDTH = 44


@dataclass
class Profile:
    """Records the chosen steps once. A change of world ends only the profile."""

    steps: range  # may be empty
    file: Path
    device: torch.device
    journal: Journal
    clock: TrainingClock  # which leaves out the time that this takes before and after the steps
    _profiler: torch.profiler.profile | None = None

    @property
    def _name(self) -> str:
        return f"steps {self.steps.start} to {self.steps.stop - 1}"

    def step_done(self, step: int) -> None:
        """Begin if the next step is the first to be recorded, and end after the last one."""
        if self._profiler is None:
            if not self.steps or step + 1 != self.steps.start:
                return
            self._begin()
        elif step + 1 < self.steps.stop:
            self._profiler.step()
            return
        else:
            self._end(self._profiler)
        self.clock.restart()

    def drop(self, reason: str) -> None:
        """End a profile that lacks steps. Nothing is written."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            self.journal.event("profile", f"no profile of {self._name}: {reason}")

    def _begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines about missing GPUs
        kinds = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if self.device.type == "cuda" else []),
        ]
        self._profiler = torch.profiler.profile(
            activities=kinds, schedule=lambda _: ProfilerAction.RECORD, acc_events=True
        )
        self._profiler.step_num = self.steps.start
        self._profiler.start()

    def _end(self, profiler: torch.profiler.profile) -> None:
        """Write the trace of this rank, and show the largest costs of rank 0."""
        profiler.stop()
        self._profiler = None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with (
                durable.writing(self.file) as file,
                NamedTemporaryFile(suffix=self.file.suffix) as trace,
            ):
                profiler.export_chrome_trace(trace.name)
                shutil.copyfileobj(trace, file)
        except OSError as error:
            say(f"no profile of {self._name}: cannot write {self.file}: {error.strerror}")
            return
        key = f"self_{'device' if self.device.type == 'cuda' else 'cpu'}_time_total"
        costs = profiler.key_averages().table(
            sort_by=key, row_limit=_LARGEST, max_name_column_width=_NAME_WIDTH
        )
        message = f"profile of {self._name}: {self.file} (https://ui.perfetto.dev opens it)"
        self.journal.event("profile", f"{message}\n{costs}")
