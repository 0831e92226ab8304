"""Profile chosen steps on all ranks (`--profile STEPS`): write a trace of each rank, and a summary."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, record_function

from hvd_train.progress.clock import Split, Stopwatch
from hvd_train.run_files import durable
from hvd_train.run_files.journal import Journal
from hvd_train.world.world import World

FOLDER = "profile"
_MOST_RANKS = 32  # rank 0 holds all traces in memory
_LARGEST, _NAME_WIDTH = 10, 44  # rows of the summary, and characters of a name in it


class Profile:
    """Records the chosen steps once. An error of the profiler or a change of world ends only the profile."""

    def __init__(
        self,
        steps: range,
        world: World,
        device: torch.device,
        journal: Journal,
        folder: Path | None,
        stopwatch: Stopwatch,
        split: Split,
    ) -> None:
        """`steps` may be empty; `folder` is the run folder on the rank that writes it, None on other ranks."""
        self._wanted, self._world, self._device, self._journal = steps, world, device, journal
        self._folder, self._stopwatch, self._split = folder, stopwatch, split
        self._is_active, self._steps = False, list[int]()  # the complete steps
        self._files: TemporaryDirectory[str] | None = None
        self._profiler: torch.profiler.profile | None = None  # while it records
        self._span: record_function | None = None  # of the step under way
        self._trace, self._summary, self._problem = b"", "", ""

    def end(self, reason: str, *, alone: bool) -> None:
        """End a running profile; `alone` if other ranks may be lost."""
        if self._is_active:
            self._end(reason, alone=alone)

    def step_done(self, step: int) -> None:
        """Record that all ranks have done this step. Raises RankLost if the profile ends with it."""
        if not self._is_active:
            self.begin_after(step)
            return
        self._steps.append(step)
        if step + 1 == self._wanted.stop:
            self._end()
        else:
            self._mark(step + 1)

    def begin_after(self, step: int) -> None:
        """Begin if the next step is the first to be recorded."""
        if not self._wanted or step + 1 != self._wanted.start:
            return
        self._is_active = True
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines about missing GPUs
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with self._not_fatal():
            self._files = TemporaryDirectory(prefix="hvd-train-profile-")
        self._world.timeline(self._file("horovod.json"))
        with self._not_fatal():
            self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)
            self._profiler.start()
        self._mark(step + 1)
        self._stopwatch.restart()

    def _end(self, reason: str = "", *, alone: bool = False) -> None:
        """Stop recording and write the traces; `alone` writes only this rank's, if another rank may be lost."""
        self._stop()
        own = self._trace, self._problem and f"rank {self._world.place.rank}: {self._problem}"
        traces = [own] if alone else self._world.gather(own)
        self._is_active = False
        if self._folder is not None:
            self._journal.event("profile", self._written(self._folder / FOLDER, traces, reason))
        if self._files is not None:
            with suppress(OSError):
                self._files.cleanup()
        self._stopwatch.restart()
        self._split.restart()

    def _stop(self) -> None:
        """Stop recording, once: this may be called again if a rank is lost while the traces are gathered."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._mark(None)
        with self._not_fatal():
            profiler.stop()
        self._world.timeline(None)
        file = self._file("torch.json.gz")
        if self._steps and file is not None and self._world.place.rank < _MOST_RANKS:
            with self._not_fatal():
                profiler.export_chrome_trace(str(file))
                self._trace = file.read_bytes()
                key = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
                costs = profiler.key_averages()
                self._summary = costs.table(sort_by=key, row_limit=_LARGEST, max_name_column_width=_NAME_WIDTH)

    def _written(self, folder: Path, traces: Sequence[tuple[bytes, str]], reason: str) -> str:
        """Write the traces, and return the message for the user."""
        problem = next((problem for _, problem in traces if problem), "")
        if problem or not self._steps:
            return f"no profile of {_named(self._wanted)}: {problem or reason}; training continues without it"
        steps, size = _named(range(self._steps[0], self._steps[-1] + 1)), self._world.place.size
        path, timeline = folder / steps.replace(" ", "-"), self._file("horovod.json")
        files = {f"{path}-rank-{rank}.json.gz": trace for rank, (trace, _) in enumerate(traces) if trace}
        of_ranks = f"{len(files)} of {size} ranks" if size > 1 else "1 rank"
        try:
            folder.mkdir(exist_ok=True)
            if timeline is not None and timeline.exists():
                files[f"{path}-horovod.json"] = timeline.read_bytes()
            for name, content in files.items():
                durable.write(Path(name), content)
        except OSError as error:
            return f"no profile of {steps}: cannot write {path}-*: {error.strerror}; training continues without it"
        end = f" ({reason})" if reason else ""
        opened = f"{path}-* (https://ui.perfetto.dev opens them)"
        return f"profile of {steps}{end}, on {of_ranks}: {opened}\n{self._summary}"

    def _mark(self, step: int | None) -> None:
        """End the span of a step in the trace, and begin the next one's; None begins none."""
        with self._not_fatal():
            if self._span is not None:
                self._span.__exit__(None, None, None)
            # torch adds up steps of this name in its summary.
            self._span = None if step is None else record_function(f"ProfilerStep#{step}")
            if self._span is not None:
                self._span.__enter__()  # type: ignore[no-untyped-call]

    def _file(self, name: str) -> Path | None:
        return None if self._files is None else Path(self._files.name) / name

    @contextmanager
    def _not_fatal(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # an error of the profiler must not end the training
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._problem = self._problem or f"the profiler failed ({reason})"


def _named(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
