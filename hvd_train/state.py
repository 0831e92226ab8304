"""The training state as one value. Its snapshot is sent to other ranks, written as a checkpoint and resumed from."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hvd_train.data.identity import Identity
from hvd_train.data.trees import map_tensors
from hvd_train.errors import ReplicasDiffer, UsageError, first_few
from hvd_train.network import buffers, optim, weights
from hvd_train.network.buffers import digest_of, tensors_in
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files.journal import EpochRecord, StepRecord
from hvd_train.run_files.ledger import Entry
from hvd_train.tasks.task import LOSS, Scores
from hvd_train.world.world import World

START, HEAD, STEPS, TAIL = range(4)
"""The parts of a program: before the loop; in an epoch before its steps, its steps, and after them."""
Label = tuple[int, int, int, int]
"""A collective of the user's program: epoch, part, step (0 outside of STEPS), and its number there."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation on the validation set after an epoch (counted from 1), by name."""

    epoch: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What an update or an evaluation has given the program on all ranks."""

    scores: Scores
    # Of an update only:
    totals: Totals = Totals()  # sums of the measures over the whole global batch
    skipped: bool = False  # whether loss or gradient was not finite, so that nothing changed
    gradient_norm: float = 0.0  # the 2-norm of the whole gradient before it was clipped
    fingerprint: int | None = None  # of the samples of all ranks (`progress.order`), if the run keeps a ledger


@dataclass(frozen=True)
class Point:
    """A point of the program, and the values that its code had set there; without any code, the start.

    A rank that comes later runs the code from here on, with these values. What the others have computed together since
    then is answered from their record.
    """

    epoch: int = -1  # epochs before this one
    part: int = START
    step: int = 0  # steps done
    cursor: int = 0  # samples of the epoch that are used
    best: Evaluation | None = None
    last: Evaluation | None = None
    settings: Sequence[Mapping[str, Any]] = ()  # of each parameter group: learning rate, momentum, ...
    own: Mapping[str, Any] = field(default_factory=dict)  # registered values by name
    own_at_epoch: Mapping[str, Any] = field(default_factory=dict)  # the same at the beginning of the epoch

    def label(self, number: int) -> Label:
        """Return the label of a collective after this point; they are counted from 0."""
        return self.epoch, self.part, self.step + 1 if self.part == STEPS else 0, number


Snapshot = dict[str, Any]  # plain values and CPU tensors only, so that loading it runs no code


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    epoch: int = 0  # epochs done
    cursor: int = 0  # samples of the current epoch that are used
    step: int = 0  # optimizer steps done since the run began
    skipped: int = 0  # steps among these that changed nothing, because the loss or its gradient was not finite
    skipped_in_row: int = 0  # steps skipped since the last one that was not

    def after_step(self, num_samples: int, *, skipped: bool = False) -> Progress:
        """Return the progress one step later, in which `num_samples` of the epoch were consumed."""
        in_row = self.skipped_in_row + 1 if skipped else 0
        return Progress(self.epoch, self.cursor + num_samples, self.step + 1, self.skipped + skipped, in_row)


_PLAIN = (bool, int, float, str, type(None), Tensor)  # what checkpoints may have besides containers
TENSORS = "model", "average", "buffers", "optimizers"
"""The parts of a snapshot that hold tensors and are compared."""
_FACTS = "progress", "layout", "totals", "scaler"
_VALUES: dict[str, type[Any]] = {"layout": BatchLayout, "progress": Progress, "totals": Totals}
_VALUES |= {"last_step": StepRecord, "last_epoch": EpochRecord}


@dataclass
class TrainState:
    """The state of a training. It holds no random numbers: they follow from the seed and the progress."""

    model: nn.Module
    optimizers: Mapping[str, Optimizer]  # by name; a single one has the name ""
    scaler: torch.amp.GradScaler
    layout: BatchLayout
    progress: Progress = Progress()
    seconds: float = 0.0  # of training until the last step, without pauses before a resume; the same on all ranks
    totals: Totals = Totals()
    best: Evaluation | None = None
    last: Evaluation | None = None
    point: Point = field(default_factory=Point)  # the last one
    answers: dict[Label, Answer] = field(default_factory=dict)  # since the point, and others that ranks may need
    recent: list[Entry] = field(default_factory=list)  # ledger entries of the epoch that may not be on disk yet
    last_step: StepRecord | None = None  # another rank may have to write these two records if rank 0 is lost
    last_epoch: EpochRecord | None = None
    average: AveragedModel | None = None  # the moving average of the model, if one is kept
    data: Identity | None = None  # the data of the run; None on a rank that has not loaded the run's state yet

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer, or the first one."""
        return next(iter(self.optimizers.values()))

    @property
    def result(self) -> nn.Module:
        """The model to evaluate and to write as weights: the moving average, if any."""
        return self.model if self.average is None else self.average.module

    def count_step(self, totals: Totals, *, skipped: bool) -> None:
        """Count a step in the average, the progress and, if its loss is finite, the sums."""
        if self.average is not None and not skipped:
            self.average.update_parameters(self.model)
        self.progress = self.progress.after_step(totals.count, skipped=skipped)
        if math.isfinite(totals.sums[LOSS]):
            self.totals += totals

    def come_to(self, epoch: int, part: int, own: SimpleNamespace) -> None:
        """Come to a point of the program, with this registered state."""
        step, cursor, values = self.progress.step, self.progress.cursor, values_of(own)
        at_epoch = values if part == HEAD else self.point.own_at_epoch
        self.point = Point(epoch, part, step, cursor, self.best, self.last, self.settings(), values, at_epoch)
        # A newcomer needs answers before the loop and at the head of the epoch; a survivor behind lacks the last one.
        last = next(reversed(self.answers), None)
        self.answers = {
            label: answer
            for label, answer in self.answers.items()
            if label == last or label[1] == START or label[:2] == (epoch, HEAD)
        }

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each parameter group, which the program may change."""
        return [
            {name: group[name] for name in optimizer.defaults if name in group}
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
        ]

    def snapshot(self) -> Snapshot:
        """Return a copy of the state in host memory, which later steps do not touch."""
        live = self.live()
        return {**live, **{name: to_host(live[name]) for name in (*TENSORS, "scaler")}}

    def live(self) -> Snapshot:
        """Return the state as `snapshot` does, but with the tensors themselves, which later steps change."""
        return {
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            # Files of weights, which are plain state_dicts, do not have these buffers.
            "buffers": [buffers.not_in_state_dict(m) for m in (self.model, self.average) if m is not None],
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
            **{name: (value := getattr(self, name)) and dataclasses.asdict(value) for name in _VALUES},
            "point": (point := dataclasses.asdict(self.point)),
            "best": point.pop("best"),
            "last": point.pop("last"),
            "answers": [(label, dataclasses.asdict(answer)) for label, answer in self.answers.items()],
            "recent": [dataclasses.asdict(entry) for entry in self.recent],
            "seconds": self.seconds,
            "data": self.data,
        }

    def load(self, snapshot: Snapshot, *, behind: bool = False) -> None:
        """Load a snapshot. Raises UsageError, before anything changes, if it is of another model or optimizer.

        With `behind` this rank continues its own program, so it keeps its point and what its code has set.
        """
        check_same_shapes(self.model.state_dict(), snapshot["model"])
        settings = self.settings() if behind else snapshot["point"]["settings"]
        if snapshot["optimizers"].keys() != self.optimizers.keys():
            raise UsageError(f"the checkpoint is of other optimizers: {', '.join(snapshot['optimizers'])}")
        for name, optimizer in self.optimizers.items():  # before the parameters: this may change weights
            groups, states = optimizer.param_groups, optimizer.state
            try:
                optimizer.load_state_dict(copy.deepcopy(snapshot["optimizers"][name]))  # it keeps the tensors
            except ValueError as error:
                raise UsageError(f"the checkpoint is of another optimizer: {error}") from None
            for group, loaded in zip(groups, optimizer.param_groups, strict=True):
                group.update(loaded)
            optimizer.param_groups = groups  # the user's optimizer and schedulers share them
            loaded_states = dict(optimizer.state)
            states.clear()
            states.update(loaded_states)
            optimizer.state = states
            optim.match_memory_format(optimizer)
        all_groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        for group, of_point in zip(all_groups, settings, strict=False):
            group.update(of_point)
        if snapshot["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(snapshot["scaler"])
        for name, kind in _VALUES.items():
            setattr(self, name, snapshot[name] and kind(**snapshot[name]))
        answers = {tuple(label): _answer(**answer) for label, answer in snapshot["answers"]}
        self.answers = {**self.answers, **answers} if behind else answers
        if not behind:
            self.best, self.last = (snapshot[name] and Evaluation(**snapshot[name]) for name in ("best", "last"))
            self.point = Point(**snapshot["point"], best=self.best, last=self.last)
        self.recent = [Entry(**entry) for entry in snapshot["recent"]]
        self.data, self.seconds = snapshot["data"], snapshot["seconds"]
        if self.average is not None:
            weights.load(snapshot["average"], self.average)
        weights.load(snapshot["model"], self.model)
        for module, values in zip((self.model, self.average), snapshot["buffers"], strict=False):
            if module is not None:
                buffers.load(module, values)

    def digest(self) -> str:
        """Return a fingerprint of weights, buffers, optimizer state and progress."""
        return digest_of_snapshot(self.live())


def result_in(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the weights of the model that `TrainState.result` names, out of a snapshot."""
    weights: dict[str, Tensor] = snapshot["model"]
    if snapshot["average"] is not None:
        weights = {name: snapshot["average"][f"module.{name}"] for name in weights}
    return weights


def _answer(scores: Mapping[str, Any], totals: Mapping[str, Any], **values: Any) -> Answer:
    return Answer(Scores(**scores), Totals(**totals), **values)


def digest_of_snapshot(snapshot: Snapshot) -> str:
    """Return what `TrainState.digest` returns for the state with this snapshot."""
    facts, tensors = ([snapshot[name] for name in names] for names in (_FACTS, TENSORS))
    return digest_of(repr(facts), tensors_in(tensors))


def confirm_equal(state: TrainState, world: World) -> None:
    """Compare the states of all ranks bit for bit. Raises ReplicasDiffer, and RankLost."""
    digests = world.gather(state.digest())
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ReplicasDiffer(
            f"ranks {', '.join(map(str, odd))} hold other weights than rank 0 at step {state.progress.step}; "
            "this must not happen: please report it with the run's config.yaml"
        )


def to_host(value: Any) -> Any:
    """Return a copy of nested values with every tensor in host memory."""
    return map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def check_same_shapes(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise UsageError that names the first tensors in which two models differ."""
    shapes, other = ({name: tuple(t.shape) for name, t in each.items()} for each in (mine, theirs))
    if wrong := sorted(name for name in {**shapes, **other} if shapes.get(name) != other.get(name)):
        shown = first_few([f"{name} {other.get(name, 'absent')} for {shapes.get(name, 'absent')}" for name in wrong], 3)
        raise UsageError(f"the checkpoint is of another model: {shown}; start it with the same --model and --data")


def values_of(own: SimpleNamespace) -> dict[str, Any]:
    """Return a copy of the registered state by name. Raises UsageError for what cannot be written."""
    things = vars(own)
    for name, thing in things.items():
        if not (_has_state(thing) or _is_plain(thing)):
            raise UsageError(f"register({name}=...): {type(thing).__name__} has no state_dict and is no plain value")
    return {name: copy.deepcopy(thing.state_dict() if _has_state(thing) else thing) for name, thing in things.items()}


def set_values(own: SimpleNamespace, values: Mapping[str, Any]) -> None:
    """Give the registered state what `values_of` returned."""
    for name, value in values.items():
        thing: Any = getattr(own, name, None)
        if _has_state(thing):
            thing.load_state_dict(copy.deepcopy(value))
        else:
            setattr(own, name, copy.deepcopy(value))


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
