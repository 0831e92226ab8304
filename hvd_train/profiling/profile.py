"""`--profile STEPS`: chosen steps as each rank and Horovod saw them, in one trace, and what they cost.

Whatever goes wrong with a profile ends the profile with one line, never the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hvd_train.profiling import trace
from hvd_train.profiling.recording import ClockSample, RankTrace, Recording, sample_clocks
from hvd_train.progress.clock import Split, Stopwatch
from hvd_train.run_files import durable
from hvd_train.run_files.journal import Journal
from hvd_train.world.world import World

FOLDER = "profile"
_MOST_RANKS = 32  # rank 0 holds the traces of all of them in memory


class Profile:
    """Records the wanted steps on all ranks: it begins before the first of them and ends after the last one.

    A change of world ends it, too; rank 0 then writes what it has of itself and of Horovod. The profile does not go on
    in the next world, where a newcomer knows nothing of it.
    """

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
        """`steps` may be empty; `folder` is the run folder on the rank that writes it, and None on the others."""
        self._wanted, self._world, self._device, self._journal = steps, world, device, journal
        self._folder, self._stopwatch, self._split = folder, stopwatch, split
        self._recording: Recording | None = None

    @contextmanager
    def within(self, step: int) -> Iterator[None]:
        """Train inside this block, after `step` steps; when the block ends, so does a profile that is under way."""
        try:
            if self._wanted and step >= self._wanted.start:
                self._report(f"nothing more is traced of {_named(self._wanted)}: step {step} is done already")
            self._begin_after(step)
            yield
            if self._recording is not None:
                self._end(self._recording, sample_clocks(self._world), "the training ended then")
        except BaseException as error:
            if self._recording is not None:
                self._end(self._recording, None, f"{type(error).__name__} broke it off")
            raise

    def step_done(self, step: int) -> None:
        """Take note that all ranks have done this step. Raises RankLost where the profile begins or ends with it."""
        if self._recording is None:
            self._begin_after(step)
        else:
            self._recording.step_done(step)
            if step + 1 == self._wanted.stop:
                self._end(self._recording, sample_clocks(self._world))

    def _begin_after(self, step: int) -> None:
        if step + 1 != self._wanted.start or not self._wanted:
            return
        recording = self._recording = Recording(self._device)
        self._world.timeline(recording.timeline)
        recording.start()
        recording.clocks = sample_clocks(self._world)
        recording.start_steps(self._split)
        self._stopwatch.restart()

    def _end(self, recording: Recording, clocks: list[ClockSample] | None, reason: str = "") -> None:
        """Stop recording and write the trace; without `clocks` of all ranks this rank writes what it has alone."""
        recording.stop(self._split)
        self._world.timeline(None)
        rank = self._world.place.rank
        own = recording.rank_trace(rank, clocks or recording.clocks) if rank < _MOST_RANKS else RankTrace()
        traces = self._world.gather(own) if clocks else [own]
        self._recording = None
        if self._folder is not None:
            self._report(self._written(self._folder / FOLDER, recording, traces, reason))
        recording.close()
        self._stopwatch.restart()
        self._split.restart()

    def _written(self, folder: Path, recording: Recording, traces: Sequence[RankTrace], reason: str) -> str:
        """Write the trace into `folder` and return what the user should know about it, or why there is none."""
        problem = next((rank.problem for rank in traces if rank.problem), None)
        if problem or not recording.steps:
            return f"no profile of {_named(self._wanted)}: {problem or reason}; training goes on without it"
        numbers = [int(step.name.removeprefix("step ")) for step in recording.steps]
        steps = _named(range(numbers[0], numbers[-1] + 1))
        size = self._world.place.size
        ranks = [rank for rank, contribution in enumerate(traces) if contribution.events]
        clocks = f"clocks of ranks within {max(rank.uncertainty_ns for rank in traces) / 1e6:.3f} ms of rank 0's"
        if recording.horovod:
            clocks += f", Horovod's within {recording.horovods_clock.uncertainty_ns / 1e6:.3f} ms"
        events = [*[traces[rank].events for rank in ranks], trace.packed(recording.horovods_events(size + 1))]
        facts = {"steps": steps, "ranks": ranks, "world_size": size, "torch": torch.__version__, "clocks": clocks}
        path = folder / f"{steps.replace(' ', '-')}.json.gz"
        try:
            folder.mkdir(exist_ok=True)
            durable.write(path, trace.merged(events, facts | {"cut_short": reason}))
        except OSError as error:
            return f"no profile of {steps}: cannot write {path}: {error.strerror}; training goes on without it"
        whose = f"{len(ranks)} of {size} ranks" if size > 1 else "1 rank"
        end = f" ({reason})" if reason else ""
        first_line = f"profile of {steps}{end}, on {whose}: {path}, to be opened at https://ui.perfetto.dev"
        return "\n".join([first_line, *recording.summary(), f"  {clocks}"])

    def _report(self, message: str) -> None:
        self._journal.event("profile", message)


def _named(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
