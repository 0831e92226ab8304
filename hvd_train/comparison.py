"""Find the step and the tensors in which two runs part, and what differs between them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_train import checkpoint
from hvd_train.data.trees import tensors_in
from hvd_train.errors import UsageError, counted, first_few
from hvd_train.network.digest import digest_of
from hvd_train.proof import gap_between, leaves
from hvd_train.run_files import commits, history, run_folder
from hvd_train.run_files.ledger import StepAnswer, answers_in, states_in, world_sizes_in
from hvd_train.state import TENSORS

_OF_EACH_RUN = {"output_dir", "started", "command"}
_WIDTH = 60  # of a value that is shown


def difference(one: Path, other: Path) -> tuple[bool, list[str]]:
    """Return whether two runs have computed the same, and lines that say where they part.

    The last lines are of their settings, data and machines. Raises UsageError if nothing of both
    can be compared.
    """
    found = history.read(one)
    other_found = history.read(other)
    answers = answers_in(one)
    others = answers_in(other)
    paths = _commits_of_both(one, other)
    states = states_in(one)
    other_states = states_in(other)
    both = sorted(key for key in states.keys() & other_states.keys() if key[0] not in paths)
    if not (answers and others) and not paths and not both:
        raise UsageError(
            f"{one} and {other}: nothing can be compared, since one has no answers in a ledger "
            "(--ledger), and they have committed no same step"
        )
    verdicts = []  # what differs, if anything does, and what to say else
    if answers and others:
        same = f"all {len(answers)} steps are the same"
        verdicts.append((_parting_step(answers, others), same))
    if both:
        odd = [step for step, epoch in both if states[step, epoch] != other_states[step, epoch]]
        differing = f"the states after step {odd[0]} differ" if odd else ""
        same = f"the states after {counted(len(both), 'step')}, up to {both[-1][0]}, are the same"
        verdicts.append((differing, same))
    if paths:
        same = (
            f"all tensors of {counted(len(paths), 'commit')}, up to step {max(paths)}, are the same"
        )
        verdicts.append((_parting_tensors(paths), same))
    lines = [differing or same for differing, same in verdicts]
    is_same = not any(differing for differing, _ in verdicts)
    return is_same, lines + _differing(_facts(found), _facts(other_found))


def _facts(run: history.History) -> dict[str, Any]:
    """Return what a run says of its settings, data, ranks and machine, by name."""
    path = run.path / run_folder.DATA
    try:
        data = history.mapping_in(path, json.loads)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    ranks = world_sizes_in(run.path)
    return leaves({**run.settings, "data": data, "ranks": ranks, "machine": run.environment})


def _parting_step(one: Mapping[int, StepAnswer], other: Mapping[int, StepAnswer]) -> str:
    """Return a line about the first step that differs; empty if there is none."""
    both = sorted(one.keys() & other.keys())
    if not both:
        return "the ledgers have no step in common"
    for step in both:
        mine = one[step]
        its = other[step]
        if not mine.is_same(its):
            return (
                f"the runs part at step {step}: loss {mine.loss:.9g} and {its.loss:.9g}, gradient "
                f"norm {mine.gradient_norm:.9g} and {its.gradient_norm:.9g}"
            )
    if others := sorted(one.keys() ^ other.keys()):
        which = "second" if others[0] in other else "first"
        return (
            f"only the {which} run has step {others[0]}; steps {both[0]} to {both[-1]} are the same"
        )
    return ""


def _commits_of_both(one: Path, other: Path) -> dict[int, tuple[Path, Path]]:
    """Return the commits after the same steps, in their order."""
    mine = {commits.step_of(path): path for path in commits.of_run(one)}
    its = {commits.step_of(path): path for path in commits.of_run(other)}
    return {step: (mine[step], its[step]) for step in sorted(mine.keys() & its.keys())}


def _parting_tensors(paths: Mapping[int, tuple[Path, Path]]) -> str:
    """Return a line about the tensors of the first commits that differ; empty if none does.

    The first are those that differ most.
    """
    for step, (path, other) in paths.items():
        mine = _tensors_in(path)
        its = _tensors_in(other)
        gaps = {
            name: _largest_gap(mine.get(name), its.get(name))
            for name in {**mine, **its}
            if _digest(mine.get(name)) != _digest(its.get(name))
        }
        if gaps:
            ordered = sorted(gaps, key=gaps.__getitem__, reverse=True)
            shown = first_few([f"{name} by {gaps[name]:.2g}" for name in ordered], 3)
            return f"after step {step} {len(gaps)} of {len(mine)} tensors differ: {shown}"
    return ""


def _tensors_in(path: Path) -> dict[str, Tensor]:
    snapshot = checkpoint.read(path)
    found = tensors_in({name: snapshot[name] for name in TENSORS})
    return {name[1:]: tensor for name, tensor in found}


def _digest(tensor: Tensor | None) -> str:
    return "" if tensor is None else digest_of("", [("", tensor)])


def _largest_gap(one: Tensor | None, other: Tensor | None) -> float:
    gap = gap_between(one, other)
    if gap is None:  # a tensor of one run, or of another shape
        return math.inf
    return float(gap.nan_to_num(math.inf).max()) if len(gap) else 0.0


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that differs."""
    return [
        f"{name}: {_shown(one.get(name))}, and {_shown(other.get(name))}"
        for name in {**one, **other}
        if one.get(name) != other.get(name) and not {*name.split("/")} & _OF_EACH_RUN
    ]


def _shown(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
