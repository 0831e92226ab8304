"""`hvd-train tune`: Horovod's settings for these hosts, this model and this batch, measured against its defaults.

Horovod's autotune makes a proposal, and a few settings that it does not try are candidates beside it. The most
promising candidate is measured again, in turns with the defaults. Each turn is a job of its own, since a process keeps
the settings that it had when its ranks first met.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.errors import HvdTrainError, UsageError
from hvd_train.launch import tuned
from hvd_train.launch.tuned import CACHE, CYCLE, DEFAULTS, FUSION, describe
from hvd_train.progress.clock import duration
from hvd_train.run_files import durable

Settings = Mapping[str, str]
"""Horovod's environment variables and their values."""
TURN = "HVD_TRAIN_TUNE_SECONDS"  # set for a rank that is to take a turn: about how many seconds that shall last
ANSWER = "hvd_train tune:"  # begins the line in which rank 0 prints the result of a turn
LOG = "HOROVOD_AUTOTUNE_LOG"
_SAMPLES = 12
# Autotune multiplies its samples by all combinations of flags that matter only between hosts or with NCCL. With these
# fixed, it looks for the best fusion threshold and cycle time alone.
AUTOTUNE = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(_SAMPLES),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_TORUS_ALLREDUCE": "0",
    CACHE: DEFAULTS[CACHE],
}
# Autotune begins at a cycle of 5 ms and never goes below 1 ms. Our gradients come in groups of 25 MB, which a lower
# fusion threshold cuts.
_CANDIDATES: Sequence[Settings] = ({CYCLE: "0.5"}, {CYCLE: "2.5"}, {FUSION: str(4 * 2**20)}, {FUSION: str(12 * 2**20)})
_START_S = 6.0  # that the ranks of a job take to start on two idle cores
_ROUNDS = 2  # in each of which every candidate takes a turn


@dataclass(frozen=True)
class Ranks:
    """How to start the ranks of a turn: the launcher with its flags, and the command of each rank.

    A turn lasts about `turn_s` seconds.
    """

    launcher: Sequence[str]
    command: Sequence[str]
    turn_s: float

    def seconds(self, settings: Settings) -> float:
        """Return the seconds that a step takes with these settings, the others being Horovod's defaults.

        Raises UsageError or HvdTrainError, with the ranks' reason, where the turn fails.
        """
        return float(self._turn(settings)["seconds"])

    def autotuned(self) -> dict[str, str] | None:
        """Return the settings that Horovod's autotune proposes, or None where it does not finish.

        Raises UsageError or HvdTrainError, with the ranks' reason, where the turn fails.
        """
        proposed: dict[str, str] | None = self._turn(AUTOTUNE)["proposal"]
        return proposed

    def _turn(self, settings: Settings) -> dict[str, Any]:
        environment = {**os.environ, **settings, TURN: str(self.turn_s)}
        command = [*self.launcher, *self.command]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UsageError(f"there is no {command[0]} to start ranks with: see docs/building.md") from None
        answer = re.search(re.escape(ANSWER) + r" (\{.*\})", done.stdout)
        if done.returncode or answer is None:
            errors = [line for line in (done.stdout + done.stderr).splitlines() if "hvd-train: " in line]
            last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
            reason = errors[0].partition("hvd-train: ")[2] if errors else last_line
            error_type = UsageError if done.returncode == UsageError.exit_code else HvdTrainError
            raise error_type(f"the ranks said: {reason}")
        result: dict[str, Any] = json.loads(answer[1])
        return result


def proposal(log: Path) -> dict[str, str] | None:
    """Return the settings that autotune's log ends with, or None while it has not ended."""
    lines = log.read_text().splitlines() if log.exists() else []
    length = 1 + (_SAMPLES + 1) + 1  # a headline, the samples, and the best of them once more
    if len(lines) < length:
        return None
    cycle, fusion = (float(word) for word in lines[length - 1].split(",")[4:6])
    return {FUSION: str(round(fusion * 2**20)), CYCLE: f"{cycle:.2f}"}


class Progress:
    """Counts the jobs of a search, and says how far it is and how long the rest will take."""

    def __init__(self, num_jobs: int, job_s: float) -> None:
        """`job_s` is how many seconds a job may take, as long as none is done."""
        self.num_jobs, self._job_s = num_jobs, job_s
        self._done, self._started = 0, time.monotonic()

    def count(self, jobs: int) -> str:
        """Count jobs that are done, and return the beginning of a line about them."""
        self._done += jobs
        return f"{self._done:>3} of {self.num_jobs}, {duration(self.left_s())} left: "

    def left_s(self) -> float:
        """Return about how many seconds the rest will take."""
        each = (time.monotonic() - self._started) / self._done if self._done else self._job_s
        return max(0, self.num_jobs - self._done) * each


def pace(ratio: float) -> str:
    """Return in words how fast it is to take `ratio` times as long as something else: `1.33x faster` for 0.75."""
    factor = f"{max(ratio, 1 / ratio):.2f}"
    return "as fast" if factor == "1.00" else f"{factor}x {'faster' if ratio < 1 else 'slower'}"


def tune(ranks: Ranks, output: Path, turns: int, report: Callable[[str], None]) -> None:
    """Find settings and write them to `output`: the defaults, unless other settings are faster for sure.

    `turns` is how often the best candidate and the defaults are compared; `report` is called with each line of news,
    the first of which says how long all will take. Raises UsageError or HvdTrainError, with the ranks' reason, where a
    turn fails.
    """
    num_jobs = 1 + _ROUNDS * (1 + len(_CANDIDATES) + 1) + 2 * turns  # autotune, each candidate beside the defaults, ...
    progress = Progress(num_jobs, ranks.turn_s + _START_S)
    report(
        f"{num_jobs} short trainings of about {ranks.turn_s:g} s each, which take some {_START_S:g} s to start: about "
        f"{duration(progress.left_s())} in all"
    )
    best = _most_promising(ranks, progress, report)
    ratios = list[float]()
    for turn in range(turns):
        ratios.append(_ratio(ranks, best, settings_first=bool(turn % 2)))
        report(f"{progress.count(2)}the best one again  {describe(best)}  {pace(ratios[-1])}")
    low, high = interval(ratios)
    verdict = (
        f"{describe(best)}, beside the defaults: {pace(statistics.median(ratios))} "
        f"(95% interval of the speed: {1 / high:.3f}x to {1 / low:.3f}x)"
    )
    faster = high < 1
    meaning = "these are faster" if faster else "these are the defaults: nothing is faster for sure"
    jobs = [f"hvd-train tune, on {socket.gethostname()}: {' '.join(ranks.launcher[1:])}", " ".join(ranks.command[1:])]
    settings = {**DEFAULTS, **best} if faster else DEFAULTS
    durable.write_text(output, tuned.text(settings, [*jobs, f"{turns} turns: {verdict}", meaning]))
    report(f"measured again: {verdict}")
    report(f"{output}: {meaning}; to use it: hvd-train train --tuned {output}")


def _most_promising(ranks: Ranks, progress: Progress, report: Callable[[str], None]) -> Settings:
    """Return the candidate with the smallest median ratio of its time to that of the defaults."""
    proposed = ranks.autotuned()
    if proposed is None:
        progress.num_jobs -= _ROUNDS
    news = "autotune does not finish" if proposed is None else f"autotune proposes   {describe(proposed)}"
    report(f"{progress.count(1)}{news}")
    candidates: list[Settings] = [*([proposed] if proposed else []), *_CANDIDATES]
    ratios: list[list[float]] = [[] for _ in candidates]
    for _ in range(_ROUNDS):
        default = ranks.seconds({})
        report(f"{progress.count(1)}the defaults        {describe({})}  {default * 1000:.2f} ms a step")
        for settings, ratios_of_one in zip(candidates, ratios, strict=True):
            ratios_of_one.append(ranks.seconds(settings) / default)
            report(f"{progress.count(1)}instead             {describe(settings)}  {pace(ratios_of_one[-1])}")
    return min(zip(candidates, ratios, strict=True), key=lambda pair: statistics.median(pair[1]))[0]


def _ratio(ranks: Ranks, settings: Settings, *, settings_first: bool) -> float:
    """Return the time of a step with these settings over that with the defaults, measured one after the other."""
    if settings_first:
        seconds = ranks.seconds(settings)
        return seconds / ranks.seconds({})
    default = ranks.seconds({})
    return ranks.seconds(settings) / default


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95% interval of the median of values by the bootstrap (Efron 1979), from a fixed seed."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def check(output: Path) -> None:
    """Raise UsageError where `output` cannot be written, or where the environment fixes a setting to be found."""
    if output.exists():
        raise UsageError(f"--output {output} exists: name another file, or move it away")
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output {output}: there is no folder {output.parent} to write into")
    for name in tuned.LIMITS:
        if name in os.environ:
            raise UsageError(f"{name} is set, and is one of the settings to be found: unset it")
