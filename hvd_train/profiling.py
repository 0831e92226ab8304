"""Profile chosen steps on all ranks (`--profile STEPS`): write a trace of each rank, and a summary."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from hvd_train.errors import counted
from hvd_train.output import Output
from hvd_train.progress.clock import Split, Stopwatch
from hvd_train.run_files import durable
from hvd_train.world.world import World

FOLDER = "profile"
_MOST_RANKS = 32  # rank 0 holds all traces in memory
_LARGEST, _NAME_WIDTH = 10, 44  # rows of the summary, and characters of a name in it


class Profile:
    """Records the chosen steps once. A change of world ends only the profile."""

    def __init__(
        self, steps: range, world: World, device: torch.device, output: Output, *clocks: Stopwatch | Split
    ) -> None:
        """`steps` may be empty; `clocks` leave out the time that this takes before and after them."""
        self._steps, self._world, self._device, self._output, self._clocks = steps, world, device, output, clocks
        self._is_active = False
        self._recording = ExitStack()
        self._next_step: Callable[[], object] = lambda: None
        self._trace, self._summary = b"", ""

    def step_done(self, step: int) -> None:
        """Begin if the next step is the first to be recorded, and end after the last one. Raises RankLost."""
        if self._is_active and step + 1 < self._steps.stop:
            self._next_step()
            return
        if self._is_active:
            self._recording.close()
            traces = self._world.gather(self._trace)
            self._end(self._written(self._output.path / FOLDER, traces) if self._output.path else "")
        elif self._steps and step + 1 == self._steps.start:
            self._begin()
        else:
            return
        for clock in self._clocks:
            clock.restart()

    def drop(self, reason: str) -> None:
        """End a profile that lacks steps. Nothing is written."""
        if self._is_active:
            self._recording.close()
            self._end(f"no profile of {_named(self._steps)}: {reason}")

    def _end(self, message: str) -> None:
        self._is_active = False
        self._output.journal.event("profile", message)

    def _begin(self) -> None:
        self._is_active = True
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines about missing GPUs
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = torch.profiler.profile(
            activities=kinds, schedule=lambda _: ProfilerAction.RECORD, on_trace_ready=self._export, acc_events=True
        )
        profiler.step_num = self._steps.start
        self._recording.enter_context(profiler)
        self._next_step = profiler.step

    def _export(self, profiler: torch.profiler.profile) -> None:
        if self._world.place.rank < _MOST_RANKS:
            with TemporaryDirectory(prefix="hvd-train-profile-") as folder:
                file = Path(folder, "torch.json.gz")
                profiler.export_chrome_trace(str(file))
                self._trace = file.read_bytes()
            key = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
            costs = profiler.key_averages()
            self._summary = costs.table(sort_by=key, row_limit=_LARGEST, max_name_column_width=_NAME_WIDTH)

    def _written(self, folder: Path, traces: Sequence[bytes]) -> str:
        """Write the files, and return the message for the user."""
        steps = _named(self._steps)
        path = folder / steps.replace(" ", "-")
        try:
            folder.mkdir(exist_ok=True)
            for rank, trace in enumerate(traces[:_MOST_RANKS]):
                durable.write(Path(f"{path}-rank-{rank}.json.gz"), trace)
        except OSError as error:
            return f"no profile of {steps}: cannot write {path}-*: {error.strerror}"
        of = f"{min(len(traces), _MOST_RANKS)} of {counted(len(traces), 'rank')}"
        return f"profile of {steps}, on {of}: {path}-* (https://ui.perfetto.dev opens them)\n{self._summary}"


def _named(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
