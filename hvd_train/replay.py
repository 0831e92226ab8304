"""Train steps of a run again, on any number of ranks, compare them with its ledger, and find the
samples that decided their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_train import checkpoint, config_file, loop, plugin
from hvd_train.config import Config
from hvd_train.data import identity
from hvd_train.data.random_numbers import seed_all
from hvd_train.data.sources import file_of
from hvd_train.data.trees import map_tensors
from hvd_train.errors import UsageError
from hvd_train.loops import Loops, MicroBatch
from hvd_train.membership import Membership
from hvd_train.network.buffers import unchanged
from hvd_train.parts import NOTHING, Optimizers, Own, Parts, warm_parts
from hvd_train.progress.stop import StopSignal
from hvd_train.run import OWN, check_names
from hvd_train.run_files import commits, durable
from hvd_train.run_files.ledger import StepAnswer, answers_in, states_in
from hvd_train.state import Snapshot, to_host
from hvd_train.tasks.task import LOSS, Measures, sum_of
from hvd_train.world.world import World, together

_NOT_OURS = {
    "ledger": True,  # which has the answers
    "output_dir": None,
    "copy_to": None,
    "resume": "auto",
    "commit_steps": None,
    "max_time": None,
    "patience": None,  # a replay evaluates nothing
    "device": "auto",
    "profile": None,
    "compile": False,  # compiled code frees what the backward passes of single samples need
}


@dataclass(frozen=True)
class Sample:
    """A sample of a step, and the gradient of its own loss."""

    number: int  # in the training set
    gradient_norm: float
    share: float  # of the sum of the norms of all samples; NaN if one is not finite
    file: str  # empty if it has none


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was trained again."""

    number: int
    answer: StepAnswer
    recorded: StepAnswer | None  # in the ledger
    # whether the state after it is the one that the run has committed; None if that is not known
    has_same_state: bool | None
    samples: Sequence[Sample]  # the largest norm first

    @property
    def gap(self) -> float:
        """By how much loss or norm differ from the ledger; 0.0 for the same bits."""
        if self.recorded is None or self.answer.is_same(self.recorded):
            return 0.0
        return max(self.answer.gaps(self.recorded))

    @property
    def verdict(self) -> str:
        """How the step compares with the ledger."""
        if self.recorded is None:
            return "not in the ledger"
        if self.answer.is_same(self.recorded):
            of_state = {None: "", True: ", and the same state", False: ", but another state"}
            return f"same bits{of_state[self.has_same_state]}"
        if self.gap == 0:
            return "the sums until this step differ"
        loss, norm = self.answer.gaps(self.recorded)
        return f"loss differs by {loss:.1e}, norm by {norm:.1e}"


def replay(
    run: Path,
    steps: range,
    *,
    world: World,
    own: Own = NOTHING,
    trust: bool = False,
    top: int = 3,
    save_to: Path | None = None,
) -> Iterator[ReplayedStep]:
    """Yield these steps of a run, trained again from the last commit before them.

    Each has its `top` samples. `save_to` is a file for the tensors of the last step. Code that the
    run names is imported only with `trust`. Writes nothing into the run folder, which all ranks of
    `world` must see. Raises UsageError if the run cannot be replayed, and RankLost.
    """
    if save_to is not None and world.place.size > 1:
        raise UsageError("--save-batch needs the whole step in one process: replay on one")
    if save_to is not None and not save_to.parent.is_dir():
        raise UsageError(f"--save-batch {save_to}: no such folder")
    recorded = together(world, lambda: _recorded(run, steps, own, trust=trust))
    config = recorded.config
    seed_all(config.seed)
    parts, optimizers = world.prepare(lambda: _parts(run, recorded, world, own))
    with closing(Membership(config, world, parts, optimizers, replays=recorded.commit)) as ranks:
        loops = Loops(ranks, StopSignal())
        for epoch in loops.epochs():
            loop.begin_epoch(loops, epoch)
            for step in epoch:
                loop.begin_step(loops, step)
                # a step that is taken again has these again
                norms = dict[int, float]()
                kept = {}
                problem: UsageError | None = None  # of this rank
                for micro in step:
                    with _outputs_of(parts.model) as outputs:
                        measures = parts.task.measure(parts.model, micro.batch)
                    if top and step.number in steps:
                        try:
                            norms |= _norms(measures, outputs, micro, ranks)
                        except UsageError as error:  # other ranks may have none
                            problem = error
                    if save_to is not None and step.number == steps[-1]:
                        kept[micro.number] = _kept(micro)
                    micro.backward(**measures)
                if step.number not in steps:
                    continue
                if kept and save_to is not None:
                    _save(save_to, {"step": step.number, "micro_batches": [*kept.values()]})
                answer = ranks.state.recent[-1].answers_by_step()[step.number]
                samples = _largest(_of_all_ranks(norms, problem, world), top, parts.data.train)
                state = recorded.states.get((step.number, ranks.state.progress.epoch))
                has_same_state = None if state is None else state == ranks.state.digest()
                yield ReplayedStep(
                    step.number, answer, recorded.answers.get(step.number), has_same_state, samples
                )
                if step.number == steps[-1]:
                    return
    raise UsageError(f"{run}: its training ends before step {steps[-1]}")


@dataclass(frozen=True)
class _Recorded:
    """What a replay reads of a run."""

    commit: Path  # the last one before the steps
    data: identity.Identity
    config: Config
    answers: Mapping[int, StepAnswer]  # by step
    states: Mapping[tuple[int, int], str]  # digests, by steps and epochs done


def _recorded(run: Path, steps: range, own: Own, *, trust: bool) -> _Recorded:
    """Read what a replay needs. Raises UsageError."""
    path = _commit_before(run, steps)
    snapshot = checkpoint.read(path)
    config = _config_in(snapshot, run, own, trust=trust)
    return _Recorded(path, snapshot["data"], config, answers_in(run), states_in(run))


def _parts(run: Path, recorded: _Recorded, world: World, own: Own) -> tuple[Parts, Optimizers]:
    """Build what the run trained. Raises UsageError for other data."""
    parts, optimizers = warm_parts(recorded.config, world, own)
    if changes := "; ".join(identity.differences(parts.identity, recorded.data).values()):
        raise UsageError(f"{run}: {changes}; a replay needs the data as they were")
    return parts, optimizers


def _of_all_ranks(
    norms: Mapping[int, float], problem: UsageError | None, world: World
) -> dict[int, float]:
    """Return the norms on all ranks. Raises on all of them the problem of one."""

    def mine() -> dict[int, float]:
        if problem is not None:
            raise problem
        return dict(norms)

    of_ranks = world.gather(together(world, mine), "a replay")
    return dict(chain.from_iterable(each.items() for each in of_ranks))


def _commit_before(run: Path, steps: range) -> Path:
    """Return the newest commit before the first step.

    Raises UsageError if there is none, which names the steps that can be replayed.
    """
    if not run.is_dir():
        raise UsageError(f"{run}: no such run folder")
    found = commits.of_run(run)
    before = [path for path in found if commits.step_of(path) < steps[0]]
    if before:
        return before[0]
    can = f"steps from {commits.step_of(found[-1]) + 1} on can be replayed" if found else ""
    raise UsageError(
        f"{run} has no commit before step {steps[0]}: {can or 'it has no commit at all'}; "
        "--keep-checkpoints 3,every=1000 keeps more of them"
    )


def _config_in(snapshot: Snapshot, run: Path, own: Own, *, trust: bool) -> Config:
    """Return the config of a commit, for a replay.

    Raises UsageError if its run cannot be replayed here, or names code that is not trusted.
    """
    config = config_file.from_dict(snapshot["config"], source=str(run))
    settings = config.settings()
    named = {kind: str(settings[kind]) for kind, value in vars(own).items() if value is None}
    if OWN in named.values():
        raise UsageError(
            f"{run} was trained by a program of its own, with a loop or functions that only its "
            "script knows; only runs of `hvd-train train` can be replayed"
        )
    if config.batch.on_resize == "per-worker" or config.model.sync_batch_norm:
        raise UsageError(
            f"{run}: with --on-resize per-worker or --sync-batch-norm a step depends on the number "
            "of ranks, so it cannot be replayed"
        )
    if not trust:
        plugin.check_trusted(str(run), named)
        config = config.replace(download=False)
    check_names(config, own)
    return config.replace(**_NOT_OURS)


@contextmanager
def _outputs_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Note the tensors that a model returns inside the block."""
    tensors = list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    def note_all(_model: nn.Module, _arguments: object, output: Any) -> None:
        map_tensors(output, note)

    hook = model.register_forward_hook(note_all)
    try:
        yield tensors
    finally:
        hook.remove()


def _norms(
    measures: Measures, outputs: Sequence[Tensor], micro: MicroBatch, ranks: Membership
) -> dict[int, float]:
    """Return for each sample of a micro-batch the norm of the gradient through its own outputs.

    These gradients add up to the micro-batch's. Batch norm lets a sample act on the others, too,
    which counts for the others. Raises UsageError if the model has no output for each sample.
    """
    model = ranks.parts.model
    scaler = ranks.state.scaler
    loss = sum_of(measures[LOSS])
    size = len(micro.samples)
    rows = [each for each in outputs if each.requires_grad and each.shape[:1] == (size,)]
    if not rows:
        raise UsageError(
            "the model returns no tensor with a row for each sample, so its samples cannot be told "
            "apart: type --top 0"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_rows = torch.autograd.grad(scaler.scale(loss), rows, retain_graph=True, allow_unused=True)
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    found = {}
    with unchanged(model):  # checkpointed layers run again
        for place, sample in enumerate(micro.samples.tolist()):
            gradients = torch.autograd.grad(
                rows,
                trained,
                [_only(place, row, gradient) for row, gradient in zip(rows, of_rows, strict=True)],
                retain_graph=True,
                allow_unused=True,
            )
            norms = torch._foreach_norm([each for each in gradients if each is not None])
            norm = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
            found[sample] = float(norm) / scale
    return found


def _only(place: int, row: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the gradient of the outputs, with zeros for all samples but one."""
    alone = torch.zeros_like(row)
    if gradient is not None:
        alone[place] = gradient[place]
    return alone


def _largest(norms: Mapping[int, float], top: int, data: Any) -> list[Sample]:
    """Return the samples with the largest norms; those that are not finite come first."""
    total = sum(norms.values()) or 1.0
    if not math.isfinite(total):
        total = math.nan
    ordered = sorted(norms, key=lambda number: (math.isfinite(norms[number]), -norms[number]))
    return [
        Sample(number, norms[number], norms[number] / total, file_of(data, number))
        for number in ordered[:top]
    ]


def _kept(micro: MicroBatch) -> dict[str, Any]:
    return {
        "number": micro.number,
        "samples": torch.from_numpy(micro.samples),
        "batch": to_host(micro.batch),
    }


def _save(path: Path, values: Mapping[str, Any]) -> None:
    try:
        with durable.writing(path) as file:
            torch.save(values, file)
    except OSError as error:
        raise UsageError(f"--save-batch {path}: {error.strerror}") from None
