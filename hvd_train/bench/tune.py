"""`hvd-train tune`: Horovod's settings for these hosts, this model and this batch, measured against its defaults.

Horovod's autotune makes a proposal; a few values that it does not try are others. The most promising one is measured
anew, in turns with the defaults. Each turn is a job of its own: a process keeps Horovod's settings from its first
meeting to its end, whatever it is told at the next one.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.errors import HvdTrainError, UsageError
from hvd_train.launch import tuned
from hvd_train.launch.tuned import CACHE, CYCLE, DEFAULTS, FUSION, describe
from hvd_train.run_files import durable

Settings = Mapping[str, str]
TURN = "HVD_TRAIN_TUNE_SECONDS"  # tells a rank that it is to take a turn, of about so many seconds
ANSWER = "hvd_train tune:"  # before what rank 0 has to say of its turn
LOG = "HOROVOD_AUTOTUNE_LOG"
_SAMPLES = 12
# Autotune multiplies its samples by all combinations of flags, which say nothing on one host or without NCCL. With
# these set, it looks for the best fusion and cycle time alone.
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
# It begins at a cycle of 5 ms and never goes below 1 ms. Our gradients come in groups of 25 MB, which a lower
# threshold cuts.
_OTHERS: Sequence[Settings] = ({CYCLE: "0.5"}, {CYCLE: "2.5"}, {FUSION: str(4 * 2**20)}, {FUSION: str(12 * 2**20)})
_ROUNDS = 2  # in which each of them is looked at


@dataclass(frozen=True)
class Ranks:
    """How to start them: a launcher with its flags, and the command of each rank."""

    launcher: Sequence[str]
    command: Sequence[str]
    turn_s: float

    def seconds(self, settings: Settings) -> float:
        """Of a step with these settings."""
        return float(self._turn(settings)["seconds"])

    def autotuned(self) -> dict[str, str] | None:
        """What Horovod's autotune proposes; None where it comes to no end."""
        found: dict[str, str] | None = self._turn(AUTOTUNE)["proposal"]
        return found

    def _turn(self, settings: Settings) -> dict[str, Any]:
        environment = {**os.environ, **settings, TURN: str(self.turn_s)}
        line = [*self.launcher, *self.command]
        try:
            done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UsageError(f"there is no {line[0]} to start ranks with: see docs/building.md") from None
        answer = re.search(re.escape(ANSWER) + r" (\{.*\})", done.stdout)
        if done.returncode or answer is None:
            told = [text for text in (done.stdout + done.stderr).splitlines() if "hvd-train: " in text]
            said = told[0].partition("hvd-train: ")[2] if told else (done.stderr.strip() or "nothing").splitlines()[-1]
            raise (UsageError if done.returncode == UsageError.exit_code else HvdTrainError)(f"the ranks said: {said}")
        result: dict[str, Any] = json.loads(answer[1])
        return result


def proposal(log: Path) -> dict[str, str] | None:
    """The settings that autotune's log ends with, once it has."""
    lines = log.read_text().splitlines() if log.exists() else []
    best = 1 + (_SAMPLES + 1) + 1  # a headline, the samples, and the best of them once more
    if len(lines) < best:
        return None
    cycle, fusion = (float(word) for word in lines[best - 1].split(",")[4:6])
    return {FUSION: str(round(fusion * 2**20)), CYCLE: f"{cycle:.2f}"}


def tune(ranks: Ranks, output: Path, turns: int, say: Callable[[str], None]) -> None:
    """Find settings and write them to `output`: the defaults, where nothing is faster for sure."""
    found = ranks.autotuned()
    say("autotune comes to no end" if found is None else f"autotune proposes  {describe(found)}")
    candidates: list[Settings] = [*([found] if found else []), *_OTHERS]
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(_ROUNDS):
        default = ranks.seconds({})
        say(f"the defaults       {describe({})}  {default * 1000:8.2f} ms a step")
        for settings, of_one in zip(candidates, times, strict=True):
            of_one.append(ranks.seconds(settings) / default)
            say(f"instead            {describe(settings)}  {of_one[-1]:8.2f} times as long")
    best = min(zip(candidates, times, strict=True), key=lambda one: statistics.median(one[1]))[0]
    ratios = []
    for turn in range(turns):
        pair = [ranks.seconds(one) for one in ((best, {}) if turn % 2 else ({}, best))]
        ratios.append(pair[0] / pair[1] if turn % 2 else pair[1] / pair[0])
    middle, (low, high) = statistics.median(ratios), interval(ratios)
    verdict = f"{describe(best)} takes {middle:.3f} times as long as the defaults, 95% interval {low:.3f} to {high:.3f}"
    kept = {**DEFAULTS, **best} if high < 1 else DEFAULTS
    meaning = "these are faster" if high < 1 else "these are the defaults: nothing is faster for sure"
    about = [f"hvd-train tune, on {socket.gethostname()}: {' '.join(ranks.launcher[1:])}", " ".join(ranks.command[1:])]
    durable.write_text(output, tuned.text(kept, [*about, f"{turns} turns: {verdict}", meaning]))
    say(f"measured anew: {verdict}")
    say(f"{output}: {meaning}; to use it: hvd-train train --tuned {output}")


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """The 95% interval of their median, by the bootstrap (Efron 1979); from a fixed seed."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def check(output: Path) -> None:
    """Raise UsageError where nothing could be written, or what is to be found is said already."""
    if output.exists():
        raise UsageError(f"--output {output} exists: name another file, or move it away")
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output {output}: there is no folder {output.parent} to write into")
    for name in tuned.LIMITS:
        if name in os.environ:
            raise UsageError(f"{name} is set, and is one of the settings to be found: unset it")
