"""Profile chosen steps on all ranks (`--profile STEPS`): write a trace of each rank, and a summary."""

import os
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
        self._name = f"steps {steps.start} to {steps.stop - 1}"
        self._profiler: torch.profiler.profile | None = None

    def step_done(self, step: int) -> None:
        """Begin if the next step is the first to be recorded, and end after the last one. Raises RankLost."""
        if self._profiler is None:
            if not self._steps or step + 1 != self._steps.start:
                return
            self._begin()
        elif step + 1 < self._steps.stop:
            self._profiler.step()
            return
        else:
            self._end(self._profiler)
        for clock in self._clocks:
            clock.restart()

    def drop(self, reason: str) -> None:
        """End a profile that lacks steps. Nothing is written."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            self._output.journal.event("profile", f"no profile of {self._name}: {reason}")

    def _begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines about missing GPUs
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(
            activities=kinds, schedule=lambda _: ProfilerAction.RECORD, acc_events=True
        )
        self._profiler.step_num = self._steps.start
        self._profiler.start()

    def _end(self, profiler: torch.profiler.profile) -> None:
        """Collect the traces on rank 0, and write them. Raises RankLost."""
        profiler.stop()
        self._profiler, trace = None, b""
        if self._world.place.rank < _MOST_RANKS:
            with TemporaryDirectory(prefix="hvd-train-profile-") as folder:
                file = Path(folder, "torch.json.gz")
                profiler.export_chrome_trace(str(file))
                trace = file.read_bytes()
        # A trace may be larger than one operation carries.
        traces = [self._world.broadcast(trace, rank) for rank in range(self._world.place.size)]
        if self._output.path is None:
            return
        path = self._output.path / FOLDER / self._name.replace(" ", "-")
        try:
            path.parent.mkdir(exist_ok=True)
            for rank, trace in enumerate(traces[:_MOST_RANKS]):
                durable.write(Path(f"{path}-rank-{rank}.json.gz"), trace)
            of = f"{min(len(traces), _MOST_RANKS)} of {counted(len(traces), 'rank')}"
            message = f"profile of {self._name}, on {of}: {path}-* (https://ui.perfetto.dev opens them)"
        except OSError as error:
            message = f"no profile of {self._name}: cannot write {path}-*: {error.strerror}"
        key = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
        costs = profiler.key_averages().table(sort_by=key, row_limit=_LARGEST, max_name_column_width=_NAME_WIDTH)
        self._output.journal.event("profile", f"{message}\n{costs}")
