"""The training state as one value.

Its snapshot is sent to other ranks, written as a checkpoint and resumed from.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hvd_train.data.identity import Identity
from hvd_train.data.plain import from_plain, not_constant, text_of, to_plain
from hvd_train.data.trees import map_tensors, tensors_in
from hvd_train.errors import UsageError, first_few
from hvd_train.history import HEAD, START, STEPS, History, Place
from hvd_train.network import buffers, optim, weights
from hvd_train.network.device import LossScaler
from hvd_train.network.digest import digest_of
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files.journal import EpochRecord, StepRecord
from hvd_train.run_files.ledger import Entry, extended, in_digits
from hvd_train.tasks.task import LOSS, Goal, Scores


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation on the validation set after an epoch
    (counted from 1), by name.
    """

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
    # of the samples of all ranks (`progress.order`), if the run keeps a ledger
    fingerprint: int | None = None
    loss_scale: float = 0.0  # of its gradients; 0 without one

    @property
    def has_finite_loss(self) -> bool:
        """Whether the loss of an update is finite."""
        return math.isfinite(self.totals.sums[LOSS])


@dataclass(frozen=True)
class Point:
    """A point of the program (`history.Place`), and the values that its code had set
    there; by default its start.

    A rank that comes later runs the code from here on, with these values.
    """

    epoch: int = -1  # epochs before this one
    part: int = START
    step: int = 0  # steps done
    cursor: int = 0  # samples of the epoch that are used
    best: Evaluation | None = None
    last: Evaluation | None = None
    # In plain types (`data.plain`):
    # of each parameter group: learning rate, momentum, ...
    settings: Sequence[Mapping[str, Any]] = ()
    trained: Sequence[bool] = ()  # whether each parameter of all groups requires a gradient
    modes: Sequence[bool] = ()  # whether each module is in training mode
    own: Mapping[str, Any] = field(default_factory=dict)  # registered values by name
    # the same at the beginning of the epoch
    own_at_epoch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Where this point is in the program."""
        return Place(self.epoch, self.part, self.step, self.cursor)


Snapshot = dict[str, Any]  # plain values and CPU tensors only, so that loading it runs no code


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    epoch: int = 0  # epochs done
    cursor: int = 0  # samples of the current epoch that are used
    step: int = 0  # optimizer steps done since the run began
    # steps among these that changed nothing, because the loss or its gradient was not finite
    skipped: int = 0
    skipped_in_row: int = 0  # steps skipped since the last one that was not

    def after_step(
        self, num_samples: int, *, skipped: bool = False, counts: bool = True
    ) -> Progress:
        """Return the progress one step later, in which `num_samples` of the epoch were consumed.

        A skipped step is one more in a row if it `counts`.
        """
        in_row = self.skipped_in_row + counts if skipped else 0
        return Progress(
            self.epoch, self.cursor + num_samples, self.step + 1, self.skipped + skipped, in_row
        )


_LEAST_LOSS_SCALE = 2.0**-14  # below it another cause than the scale makes gradients overflow
TENSORS = "model", "average", "optimizers"
"""The parts of a snapshot that hold tensors and are compared; "buffers" may hold caches,
which differ between ranks."""
_FACTS = "progress", "layout", "totals", "scaler", "exponents"
_VALUES: dict[str, type[Any]] = {"layout": BatchLayout, "progress": Progress, "totals": Totals}
_VALUES |= {"last_step": StepRecord, "last_epoch": EpochRecord}


@dataclass
class TrainState:
    """The state of a training.

    It holds no random numbers: they follow from the seed and the progress.
    """

    model: nn.Module
    optimizers: Mapping[str, Optimizer]  # by name; a single one has the name ""
    scaler: LossScaler
    layout: BatchLayout
    progress: Progress = Progress()
    # of training until the last step, without pauses before a resume; the same on all ranks
    seconds: float = 0.0
    totals: Totals = Totals()
    # the last one in which ranks have computed the same, compared by a second computation
    trusted_step: int = 0
    # Powers of two in the last step. By update, if its loss is divided by a count: near the count
    # for each sample. With exact sums, by update and parameter: above the norm of its gradient.
    exponents: dict[str, int] = field(default_factory=dict)
    best: Evaluation | None = None
    last: Evaluation | None = None
    point: Point = field(default_factory=Point)  # the last one
    # of this rank's program, with the results of all ranks
    history: History = field(default_factory=History)
    # ledger entries of the epoch that may not be on disk yet
    recent: list[Entry] = field(default_factory=list)
    # another rank may have to write these two records if rank 0 is lost
    last_step: StepRecord | None = None
    last_epoch: EpochRecord | None = None
    average: AveragedModel | None = None  # the moving average of the model, if one is kept
    data: Identity | None = None  # the data of the run

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer, or the first one."""
        return next(iter(self.optimizers.values()))

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler of torch drives an optimizer: it notes the first learning rate."""
        return any("initial_lr" in group for group in self._groups())

    @property
    def result(self) -> nn.Module:
        """The model to evaluate and to write as weights: the moving average, if any."""
        return self.model if self.average is None else self.average.module

    def count_step(self, totals: Totals, *, skipped: bool, loss_scale: float = 0.0) -> None:
        """Count a step in the average, the progress and, if its loss is finite, the sums.

        A step that a large `loss_scale` may have skipped is no sign of divergence: the scale falls
        with it.
        """
        if self.average is not None and not skipped:
            self.average.update_parameters(self.model)
        is_finite = math.isfinite(totals.sums[LOSS])
        counts = not (is_finite and loss_scale >= _LEAST_LOSS_SCALE)
        self.progress = self.progress.after_step(totals.count, skipped=skipped, counts=counts)
        if is_finite:
            self.totals += totals

    def enter_step(self, fingerprint: int, answer: Answer, world_size: int, of_epoch: int) -> Entry:
        """Return the ledger's entry with the step that was counted last, which has this answer.

        Entries of the epoch before go: all ranks have begun this step, so their lines are on disk.
        """
        progress = self.progress
        steps = (progress.step, progress.step)
        positions = (progress.cursor - answer.totals.count, progress.cursor)
        before = self.recent[-1].answers if self.recent else ""
        loss = answer.totals.means()[LOSS]
        digits = in_digits(loss, answer.gradient_norm, answer.totals, before)
        entry = Entry(progress.epoch, steps, world_size, positions, fingerprint, digits)
        self.recent = extended(self.recent, entry, of_epoch)
        return self.recent[-1]

    def enter_digest(self, digest: str) -> Entry | None:
        """Return the ledger's last entry with the digest of this state, which ranks have compared;
        None without a ledger.
        """
        if not self.recent:
            return None
        *others, last = self.recent
        last = last.with_state(self.progress.step, self.progress.epoch, digest)
        self.recent = [*others, last]
        return last

    def end_update(self, seconds: float, exponents: Mapping[str, int]) -> None:
        """Note the seconds of training until this update, and the counts that its losses had."""
        self.seconds = seconds
        self.exponents |= exponents

    def trust(self, step: int) -> None:
        """Note that ranks have computed the same in this step."""
        self.trusted_step = step

    def log_step(self, record: StepRecord) -> None:
        """Keep the record of the last step that has one."""
        self.last_step = record

    def end_evaluation(self, evaluation: Evaluation) -> None:
        """Keep the last evaluation on the validation set."""
        self.last = evaluation

    def keep_best(self, evaluation: Evaluation, goal: Goal) -> bool:
        """Keep an evaluation as the best if it is better in the goal's figure; return
        whether it is.
        """
        best = self.best
        if best and not goal.better(evaluation.figures[goal.name], best.figures[goal.name]):
            return False
        self.best = evaluation
        return True

    def change_layout(self, layout: BatchLayout) -> None:
        """Cut the samples of steps in this layout from now on."""
        self.layout = layout

    def end_epoch(self, record: EpochRecord) -> None:
        """Begin the next epoch, after one with this record."""
        self.last_epoch = record
        self.progress = dataclasses.replace(self.progress, epoch=record.epoch, cursor=0)
        self.totals = Totals()

    def take_step(
        self,
        optimizer: Optimizer,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Let an optimizer change the weights, as `optim.take_step` does.

        Settings that it changes itself, such as a count, are its state.
        """
        before = [dict(group) for group in optimizer.param_groups]
        optim.take_step(optimizer, found_inf, grad_scale)
        own = {
            id(group): [key for key in optimizer.defaults if group.get(key) is not old.get(key)]
            for group, old in zip(optimizer.param_groups, before, strict=True)
            if len(group) != len(old) or not all(map(operator.is_, group.values(), old.values()))
        }
        if any(own.values()):
            settings = [
                {**at_point, **{key: now[key] for key in own.get(id(group), ())}}
                for at_point, now, group in zip(
                    self.point.settings, self.settings(), self._groups(), strict=False
                )
            ]
            self.point = dataclasses.replace(self.point, settings=settings)

    def come_to(self, epoch: int, part: int, own: SimpleNamespace) -> None:
        """Come to a point of the program, with this registered state."""
        step = self.progress.step
        cursor = self.progress.cursor
        values = values_of(own)
        settings = self.settings()
        if step == 1:
            self.live()  # all ranks raise UsageError if the optimizer keeps what cannot be written
        at_epoch = values if part == HEAD else self.point.own_at_epoch
        trained = [parameter.requires_grad for parameter in self._parameters()]
        modes = [module.training for module in self._modules]
        self.point = Point(
            epoch,
            part,
            step,
            cursor,
            self.best,
            self.last,
            settings,
            trained,
            modes,
            values,
            at_epoch,
        )
        self.history.come_to(self.point.place)

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each parameter group, which the program
        may change, in plain types.
        """
        settings = []
        for name, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                of_group = {key: group[key] for key in optimizer.defaults if key in group}
                for key in not_constant(of_group):
                    of_user = f"{_of_user(name)}.param_groups[{number}][{key!r}]"
                    of_group[key] = copy.deepcopy(to_plain(group[key], of_user))
                settings.append(of_group)
        return settings

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Give the parameter groups what `settings` returned."""
        for group, values in zip(self._groups(), settings, strict=False):
            _set(group, from_plain(copy.deepcopy(values)))

    def set_trained(self, point: Point) -> None:
        """Let the parameters and modules train that did at a point."""
        for parameter, requires_grad in zip(self._parameters(), point.trained, strict=False):
            parameter.requires_grad_(requires_grad)
        for module, mode in zip(self._modules, point.modes, strict=False):
            module.training = mode

    @cached_property
    def _modules(self) -> list[nn.Module]:
        # to walk through a small model at each step takes as long as a layer
        return [*self.model.modules()]

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups."""
        return [
            parameter
            for optimizer in self.optimizers.values()
            for parameter in optim.parameters_of(optimizer)
        ]

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield the parameter groups of all optimizers."""
        for optimizer in self.optimizers.values():
            yield from optimizer.param_groups

    @property
    def _device(self) -> torch.device:
        """The device of this rank."""
        return next(self.model.parameters()).device

    def snapshot(self) -> Snapshot:
        """Return a copy of the state in host memory, which later steps do not touch."""
        live = self.live()
        for _, answer in live["answers"]:
            is_evaluation = answer["totals"]["count"] == 0
            if is_evaluation and answer["scores"]["kept"]:
                answer["scores"]["kept"] = None  # they would make checkpoints large
        return to_host(live)  # type: ignore[no-any-return]

    def live(self) -> Snapshot:
        """Return the state as `snapshot` does, but with the tensors themselves,
        which later steps change.

        Raises UsageError for a value of an optimizer that has no plain form.
        """
        optimizers = optim.with_inner(self.optimizers)
        states = {
            name: to_plain(each.state_dict(), f"{_of_user(name)}.state_dict()")
            for name, each in optimizers.items()
        }
        names = {
            id(parameter): buffers.plain_name(name)
            for name, parameter in self.model.named_parameters()
        }
        if foreign := [each for each in self._parameters() if id(each) not in names]:
            raise UsageError(optim.foreign_parameters(len(foreign)))
        point = _fields(self.point)
        best = point.pop("best")
        last = point.pop("last")
        return {
            "model": buffers.kept(self.model.state_dict()),
            "average": None if self.average is None else buffers.kept(self.average.state_dict()),
            # Files of weights, which are plain state_dicts, do not have these buffers.
            "buffers": [
                buffers.kept(buffers.not_in_state_dict(model))
                for model in (self.model, self.average)
                if model is not None
            ],
            "optimizers": states,
            "groups": {
                name: [
                    [names[id(parameter)] for parameter in group["params"]]
                    for group in each.param_groups
                ]
                for name, each in self.optimizers.items()
            },
            "scaler": self.scaler.state_dict(),
            **{name: (value := getattr(self, name)) and _fields(value) for name in _VALUES},
            "point": point,
            "best": best,
            "last": last,
            "elsewhere": {
                path: tensor.device.type
                for path, tensor in tensors_in({"optimizers": states, "point": point})
                if tensor.device.type != self._device.type
            },
            "answers": [(label, _fields(answer)) for label, answer in self.history.results.items()],
            "recent": [_fields(entry) for entry in self.recent],
            "seconds": self.seconds,
            "trusted_step": self.trusted_step,
            "exponents": dict(self.exponents),
            "data": self.data,
        }

    def load(self, snapshot: Snapshot, *, behind: bool = False) -> None:
        """Load a snapshot.

        Raises UsageError, before anything changes, if it is of another model or optimizer.

        With `behind` this rank continues its own program, so it keeps its point and what its code
        has set.
        """
        check_same_shapes(self.model, snapshot["model"])
        optimizers = optim.with_inner(self.optimizers)
        if snapshot["optimizers"].keys() != optimizers.keys():
            raise UsageError(
                f"the checkpoint is of other optimizers: {', '.join(snapshot['optimizers'])}"
            )
        # before groups are added, whose settings are in the snapshot
        own_settings = self.settings()
        parameters = {
            buffers.plain_name(name): parameter for name, parameter in self.model.named_parameters()
        }
        for name, groups in snapshot["groups"].items():
            optim.add_groups(
                self.optimizers[name], [[parameters[each] for each in group] for group in groups]
            )
        # Optimizers keep the tensors.
        kept = copy.deepcopy({name: snapshot[name] for name in ("optimizers", "point")})
        kept = _placed(kept, self._device, snapshot["elsewhere"])
        for name, optimizer in optimizers.items():  # before the parameters: this may change weights
            try:
                _load_optimizer(optimizer, kept["optimizers"][name])
            except ValueError as error:
                raise UsageError(f"the checkpoint is of another optimizer: {error}") from None
        if behind:
            self.set_settings(own_settings)
        if snapshot["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(snapshot["scaler"])
        for name, kind in _VALUES.items():
            setattr(self, name, snapshot[name] and kind(**snapshot[name]))
        answers = {tuple(label): _answer(**answer) for label, answer in snapshot["answers"]}
        self.history.load(answers, behind=behind)
        if not behind:
            self.best, self.last = (
                snapshot[name] and Evaluation(**snapshot[name]) for name in ("best", "last")
            )
            self.point = Point(**kept["point"], best=self.best, last=self.last)
            self._forget_without_values()
        self.recent = [Entry(**entry) for entry in snapshot["recent"]]
        self.data = snapshot["data"]
        self.seconds = snapshot["seconds"]
        self.trusted_step = snapshot["trusted_step"]
        self.exponents = dict(snapshot["exponents"])
        if self.average is not None:
            weights.load(snapshot["average"], self.average)
        weights.load(snapshot["model"], self.model)
        for module, values in zip((self.model, self.average), snapshot["buffers"], strict=False):
            if module is not None:
                buffers.put(module, buffers.given(values))

    def _forget_without_values(self) -> None:
        """Forget evaluations whose values of `Each` are lost, if the weights are
        still those that they had.
        """
        if self.point.part != STEPS:  # else an update may have followed
            self.history.forget(self.point.place, lambda answer: answer.scores.kept is None)

    def digest(self) -> str:
        """Return a digest of weights, buffers, optimizer state and progress, for ranks with the
        same kind of device.
        """
        return digest_of_snapshot(self.live(), on_device=True)


def result_in(snapshot: Snapshot) -> dict[str, Any]:
    """Return the weights of the model that `TrainState.result` names, out of a
    snapshot, as files have them.
    """
    state: dict[str, Any] = snapshot["model"]
    if (average := snapshot["average"]) is not None:
        state = {
            name.removeprefix("module."): average[name]
            for name in average
            if name.startswith("module.")
        }
    return weights.for_file(state)


def _of_user(optimizer: str) -> str:
    return f"optimizers[{optimizer!r}]" if optimizer else "optimizer"


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of nested dataclasses.

    `dataclasses.asdict` copies tensors, and breaks a Counter.
    """
    return {
        name: _fields(each) if dataclasses.is_dataclass(each) else each
        for name, each in vars(value).items()
    }


def _placed(values: Any, device: torch.device, elsewhere: Mapping[str, str]) -> Any:
    """Return values with each tensor on this device, or where `elsewhere` says by its path."""
    paths = {id(tensor): path for path, tensor in tensors_in(values)}

    def place(tensor: Tensor) -> Tensor:
        kind = elsewhere.get(paths[id(tensor)], device.type)
        return tensor.to(device if kind != "cpu" else "cpu")

    return map_tensors(values, place)


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict in plain types; the user's optimizer and schedulers keep
    the groups that they share.

    `Optimizer.load_state_dict` casts tensors to the parameter's type, and spoils what is neither
    tensor nor number. So the saved values are put back afterwards, on their device. Raises
    ValueError, as it does.
    """
    groups = optimizer.param_groups
    states = optimizer.state
    defaults = dict(optimizer.defaults)
    optimizer.load_state_dict({**from_plain(saved), "state": saved["state"]})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        _set(group, loaded)
    loaded_states = dict(optimizer.state)
    states.clear()
    states.update(loaded_states)
    optimizer.param_groups = groups
    optimizer.state = states
    optimizer.defaults = defaults  # loading may add some, so that ranks would differ
    parameters = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=False):
        state = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            if key in state:
                state[key] = from_plain(value)
    optim.match_memory_format(optimizer)


def _set(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set values of a parameter group; a tensor, such as a learning rate, stays the user's."""
    for name, value in values.items():
        own = group.get(name)
        if (
            isinstance(own, Tensor)
            and isinstance(value, Tensor)
            and (own.shape, own.dtype) == (value.shape, value.dtype)
        ):
            own.detach().copy_(value)
        else:
            group[name] = value


def _answer(scores: Mapping[str, Any], totals: Mapping[str, Any], **values: Any) -> Answer:
    return Answer(Scores(**scores), Totals(**totals), **values)


def digest_of_snapshot(snapshot: Snapshot, *, on_device: bool = False) -> str:
    """Return a digest of what a snapshot holds, as `digest_of` does."""
    facts = [snapshot.get(name) for name in _FACTS]
    tensors = [snapshot[name] for name in TENSORS if name != "optimizers"]
    # The program of a rank may have set its learning rate for the step already, which can be a
    # tensor.
    tensors.append([{**each, "param_groups": None} for each in snapshot["optimizers"].values()])
    return digest_of(text_of(facts), tensors_in(tensors), on_device=on_device)


def to_host(value: Any) -> Any:
    """Return a copy of nested values with every tensor in host memory."""
    return map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def check_same_shapes(model: nn.Module, theirs: Mapping[str, Any]) -> None:
    """Raise UsageError that names the first tensors in which two models differ."""
    shapes = _shapes(model.state_dict())
    other = _shapes(buffers.given(theirs))
    for name in map(buffers.plain_name, buffers.may_change_shape(model)):
        if name in other or name not in shapes:
            other[name] = shapes[name] = ()
    if wrong := sorted(name for name in {**shapes, **other} if shapes.get(name) != other.get(name)):
        shown = first_few(
            [
                f"{name} {other.get(name, 'absent')} for {shapes.get(name, 'absent')}"
                for name in wrong
            ],
            3,
        )
        raise UsageError(
            f"the checkpoint is of another model: {shown}; start it with the "
            "same --model and --data"
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        buffers.plain_name(name): tuple(value.shape)
        for name, value in state.items()
        if not weights.is_extra(name)
    }


def values_of(own: SimpleNamespace) -> dict[str, Any]:
    """Return a copy of the registered state by name, in plain types.

    Raises UsageError for what cannot be written.
    """
    plain = {}
    for name, thing in vars(own).items():
        if _has_state(thing):
            plain[name] = to_plain(thing.state_dict(), f"register({name}=...).state_dict()")
        else:
            plain[name] = to_plain(thing, f"register({name}=...)")
    return copy.deepcopy(plain) if not_constant(plain) else plain


def set_values(own: SimpleNamespace, values: Mapping[str, Any]) -> None:
    """Give the registered state what `values_of` returned."""
    for name, value in values.items():
        thing: Any = getattr(own, name, None)
        kept = copy.deepcopy(value)
        if isinstance(thing, Optimizer):
            _load_optimizer(thing, kept)
        elif _has_state(thing):
            thing.load_state_dict(from_plain(kept))
        else:
            setattr(own, name, from_plain(kept))


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
