"""One optimizer step: backward passes over this rank's slots, then reduce, unscale, clip, step, in that order.

What is computed of a slot is the business of whoever takes the step: `by_task`, or a loop of the user's own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from types import TracebackType

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.config import Config
from hvd_train.data.batches import Batch, MicroBatch
from hvd_train.data.trees import Tree
from hvd_train.errors import HvdTrainError, UsageError, unknown_name
from hvd_train.handover import Handover, nothing_to_hand_over
from hvd_train.network.device import seed
from hvd_train.network.normalization import sums_in_passes
from hvd_train.network.several import Copy, by_name, parameters_of, without_gradients
from hvd_train.network.step_buffers import StepBuffers
from hvd_train.progress import order
from hvd_train.progress.clock import Split
from hvd_train.progress.fingerprint import fingerprint, from_bytes, in_bytes
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Indices
from hvd_train.progress.slow_ranks import Times
from hvd_train.progress.whereabouts import here
from hvd_train.rank_times import TimesOfRanks
from hvd_train.state import TrainState
from hvd_train.tasks.meter import Row
from hvd_train.validate import Scores
from hvd_train.world.world import PendingSum, World

SLOT = 3  # tells the random numbers of a slot (dropout) from other uses of the seed


@dataclass(frozen=True)
class Votes:
    """What one rank wants to happen after a step; what any rank wants happens on all of them."""

    stop: bool = False
    """End the training, with a commit."""
    commit: bool = False
    """Write a checkpoint."""
    change: bool = False
    """Go on in another world."""
    end: bool = False
    """End the training for good: its whole time is over."""
    check: bool = False
    """Compare the states of all ranks."""
    recheck: bool = False
    """Compute a slot of the step again on all ranks, and compare its gradients."""


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step."""

    totals: Totals
    """Sums over the whole global batch."""
    agreed: Votes
    """What at least one rank wants."""
    gradient_norm: float | None
    """The 2-norm of the whole gradient before it was clipped, if it was asked for."""
    skipped: bool = False
    """Whether loss or gradient was not finite, so that nothing has changed."""
    fingerprint: int | None = None
    """The fingerprint (`progress.fingerprint`) of the samples that all ranks took, where the run keeps a ledger."""
    not_finite: tuple[int, ...] = ()
    """This rank's samples whose loss is not finite, after a skipped step."""
    times: Times | None = field(default=None, compare=False)
    """What all ranks have told of their time, where this was asked for and there are several."""


def nothing_to_do() -> None:
    """Do nothing: what is done while gradients travel, unless there is something."""


def nothing_to_note(result: StepResult) -> None:
    """Do nothing: what becomes of a result where nobody keeps it."""


@dataclass(frozen=True)
class _Outcome:
    """What is kept of the passes over one slot, without their graph and their inputs."""

    samples: Indices
    """The numbers of its samples."""
    losses: Tensor
    """[n]"""
    sums: Tensor
    """Of the losses and of what is measured (`Meter.training`)."""


_NOTHING = nullcontext()


@dataclass
class _Turn:
    """The passes and the update of one optimizer within a step."""

    name: str
    optimizer: Optimizer
    number: int
    """How many turns the step had before."""
    is_last: bool
    """Whether the step ends with it."""
    outcomes: list[_Outcome] = field(default_factory=list)
    pending: PendingSum | None = None
    """The sum of what travels with the gradients, once this rank's part is on its way."""
    num_words: int = 0
    """How many numbers of that are not of buffers."""
    others: AbstractContextManager[None] = _NOTHING
    """Has the parameters of other optimizers require no gradient."""

    @property
    def random(self) -> tuple[int, ...]:
        """What tells the random numbers of this turn from those of others in the step."""
        return (self.number,) if self.number else ()


class Steps:
    """Opens optimizer steps. It holds settings and the values of the model's buffers, and no progress."""

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        device: torch.device,
        row: Row,
        split: Split | None = None,
        handover: Handover | None = None,
        memory: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`row` is where the sums of a step lie side by side, and `split` learns where the time goes.

        Beside each step `handover` gives newcomers a part of the state. What is done within a step is done within
        `memory()`, which says what to type where memory does not suffice. Raises UsageError where the config names
        buffers that the model does not have.
        """
        self.world, self.device, self.row, self.seed, self.memory = world, device, row, config.seed, memory
        self.mark = (split or Split()).mark
        self.clip_norm = config.optimizer.clip_norm
        self.adasum = config.optimizer.reduction == "adasum"
        self.ledger = config.run.ledger
        self.buffers = StepBuffers(model, device, config.model.average_buffers)
        self.sums_in_passes = sums_in_passes(model, world, device)
        self.times = TimesOfRanks(world.place, device)
        self.handover = handover or nothing_to_hand_over(world)

    def begin(
        self,
        state: TrainState,
        batch: Batch,
        votes: Votes,
        *,
        want_norm: bool,
        meanwhile: Callable[[], None] = nothing_to_do,
        note: Callable[[StepResult], None] = nothing_to_note,
        is_last: bool = False,
        times: Sequence[float] = (),
        keep: int | None = None,
    ) -> Step:
        """Return a step to be taken with all ranks: the weights change in it, the progress does not.

        `meanwhile` is called while the gradients are on their way between the ranks, and `note` is told the result.
        `is_last` says that the epoch ends with this step. `times` is what this rank tells of its time
        (`slow_ranks.COLUMNS`); all ranks tell it in the same steps. `keep` is the number of the slot that is kept.
        """
        here.step(state.progress.step + 1)
        return Step(self, state, batch, votes, want_norm, meanwhile, note, is_last=is_last, times=times, keep=keep)

    def at_end_of_epoch(self, state: TrainState) -> Step:
        """Return a step without slots: all those of the epoch were taken in a world before this one, but not its end.

        Nothing changes in it but buffers that the ranks have not brought together.
        """
        return Step(self, state, None, Votes(), want_norm=False, is_last=True)


class Step:
    """A step that is under way: what belongs to it is done inside `with step:`.

    Whatever breaks it, nothing is half done: the state is then that of the step before. The block is left at once, and
    the error is raised by what asks for the next step or for the result.
    """

    def __init__(
        self,
        steps: Steps,
        state: TrainState,
        batch: Batch | None,
        votes: Votes,
        want_norm: bool,
        meanwhile: Callable[[], None] = nothing_to_do,
        note: Callable[[StepResult], None] = nothing_to_note,
        *,
        is_last: bool,
        times: Sequence[float] = (),
        keep: int | None = None,
    ) -> None:
        self._steps, self._state, self._batch, self._votes, self._times = steps, state, batch, votes, times
        self._keep = keep
        self.kept: MicroBatch | None = None
        """What went into the slot that was to be kept, where it was one of this rank's."""
        self._want_norm, self._meanwhile, self._note, self._is_last = want_norm, meanwhile, note, is_last
        self._memory: AbstractContextManager[None] | None = None
        self._turn: _Turn | None = None
        self._num_turns = 0
        self._results: dict[str, StepResult] = {}  # of the last turn of each optimizer
        self._copy: Copy | None = None  # of what turns before the last one change
        self._kept: tuple[MicroBatch, ...] | None = None
        self._finished = False
        self._result: StepResult | None = None
        self._error: Exception | None = None
        self.is_entered = False
        """Whether this is inside `with step:`."""
        self.epoch = state.progress.epoch
        """The whole epochs that were done before this one."""
        self.number = state.progress.step + (batch is not None)
        """The number of this step, counted from 1; that of the last one in a step without slots."""
        self.scores: Scores | None = None
        """Those of an evaluation at the end of the epoch, if there was one."""

    @property
    def ends_epoch(self) -> bool:
        """Whether the step has been taken and was the last one of its epoch: it is time to evaluate."""
        if not (self._is_last and self._finished and self._error is None):
            return False
        return self._result is None or not (self._result.agreed.stop or self._result.agreed.change)

    @property
    def result(self) -> StepResult:
        """What all ranks know after the step. Raises what has ended it early, UsageError where it was not finished."""
        self.confirm()
        assert self._result is not None
        return self._result

    def mean(self, name: str = "loss") -> float:
        """Return the mean of the loss, or of a measure, over all samples of the step: the same number on all ranks.

        NaN in a step without slots. Raises UsageError before the step is finished, and for a name that is not measured.
        """
        if not self._finished:
            raise UsageError(f"the means of step {self.number} are known after step.finish()")
        if self._result is None:
            return math.nan
        totals = self._result.totals
        sums = self._steps.row.read(totals.sums)
        if name not in sums:
            raise unknown_name("measure", name, sums)
        return float(sums[name].mean()) / totals.count

    def confirm(self) -> None:
        """Raise what has ended the step early, and UsageError where it was not finished."""
        if self._error is not None:
            raise self._error
        if not self._finished:
            raise UsageError(f"step {self.number} was not finished: inside `with step:` call step.finish() at its end")

    def __enter__(self) -> Step:
        self._memory = self._steps.memory()
        self._memory.__enter__()
        self.is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._memory is not None
        self.is_entered = False
        try:
            self._memory.__exit__(kind, error, traceback)
        except HvdTrainError as told:  # that memory does not suffice
            error = told
        if not self._finished:  # whatever has happened, nothing is half done: the state may be committed
            self._undo()
        if isinstance(error, Exception):
            self._error = error
        return isinstance(error, Exception)

    def __iter__(self) -> Iterator[Slot]:
        """Yield this rank's slots, as `slots` does for a single optimizer."""
        return self.slots()

    def slots(self, optimizer: str = "") -> Iterator[Slot]:
        """Yield this rank's slots, none or more, each to be passed through the model and given a backward pass.

        Of several optimizers one is named: it is its turn, and the parameters of the others require no gradient. Random
        numbers (dropout, mixes) are those of this step and slot, on whichever rank they are drawn.
        """
        if not self.is_entered:
            raise UsageError("go through the slots of a step inside `with step:`, so that a broken step is undone")
        if self._batch is None:
            return
        turn = self._begin(self._batch, optimizer)
        if turn.outcomes:
            raise UsageError(f"the slots of step {self.number} were passed through already: call step.finish() now")
        steps, num_own_slots = self._steps, len(self._batch.own_sizes)
        for index, micro in enumerate(self._micro_batches(self._batch), 1):
            if index == num_own_slots:
                steps.sums_in_passes.begin_last_slot()
            steps.buffers.begin_slot()
            here.at("forward")
            seed(steps.device, order.key(steps.seed, SLOT, self._state.progress.step, micro.number, *turn.random))
            if micro.number == self._keep:
                self.kept = micro
            yield Slot(self, micro, is_last=index == num_own_slots)
            if len(turn.outcomes) < index:
                raise UsageError(f"slot {micro.number} of step {self.number} had no slot.backward(loss)")

    def finish(self, optimizer: str = "") -> None:
        """Reduce, unscale, clip, step, in this order, and agree with all ranks on what they want.

        Of several optimizers the one whose turn it is is named; the turn of the last one ends the step, and those of
        the others may come more than once before it. Raises RankLost before any weight has changed, or with the weights
        put back that had changed in earlier turns, and UsageError where a slot had no backward pass.
        """
        if self._finished:
            raise UsageError(f"step {self.number} was finished already: call step.finish() once")
        if self._batch is None:
            self._finished = optimizer == [*by_name(self._state.optimizer)][-1]
        else:
            turn = self._begin(self._batch, optimizer)
            if len(turn.outcomes) < len(self._batch.own_sizes):
                raise UsageError(f"step {self.number} was finished before all of its slots had slot.backward(loss)")
            result = self._reduced_and_stepped(turn, self._batch)
            self._end(turn)
            self._results[turn.name] = result
            if not turn.is_last:
                return
            self._finished = True
            self._result = result if len(self._results) == 1 else _joined([*self._results.values()])
            self._note(self._result)
        if self.ends_epoch:
            self._steps.buffers.bring_together(self._steps.world)

    def _micro_batches(self, batch: Batch) -> Iterable[MicroBatch]:
        """Return the micro-batches of the step; where there are several turns, they stay on the device for them."""
        if self._copy is None:
            return batch.micro_batches
        if self._kept is None:
            self._kept = tuple(batch.micro_batches)
        return self._kept

    def _begin(self, batch: Batch, name: str) -> _Turn:
        """Return the turn of this optimizer, which begins unless it is under way."""
        if self._turn is not None and self._turn.name == name:
            return self._turn
        optimizers = by_name(self._state.optimizer)
        if name not in optimizers:
            raise unknown_name("optimizer", name, optimizers)
        if self._turn is not None:
            raise UsageError(f"call step.finish({self._turn.name!r}) before it is the turn of {name}")
        steps, optimizer, num_own_slots = self._steps, optimizers[name], len(batch.own_sizes)
        turn = self._turn = _Turn(name, optimizer, self._num_turns, is_last=name == [*optimizers][-1])
        if self._num_turns == 0:
            if len(optimizers) > 1:
                self._copy = Copy([*optimizers.values()][:-1], self._state.model)
            self._wait_for_part = steps.handover.start_part()
        self._num_turns += 1
        others = [parameter for one in optimizers.values() if one is not optimizer for parameter in parameters_of(one)]
        if others:
            turn.others = without_gradients(others)
            turn.others.__enter__()
        # By hand: the optimizer's own, as Horovod wraps it, takes no arguments (issue #3405), and the model's looks
        # through all its modules.
        for parameter in parameters_of(optimizer):
            parameter.grad = None
        steps.world.expect_passes(optimizer, num_own_slots)
        steps.sums_in_passes.begin_step(num_own_slots, batch.num_slots)
        steps.buffers.begin()
        # The ranks' gradients are added; Adasum wants each rank's own mean.
        divisor = max(1, sum(batch.own_sizes)) if steps.adasum else batch.size
        self._share = _constant(1 / divisor, steps.device)
        return turn

    def _end(self, turn: _Turn) -> None:
        turn.others.__exit__(None, None, None)
        self._turn = None

    def _backward(self, slot: Slot, loss: Tensor, measures: Mapping[str, Tensor]) -> None:
        """Add the gradient of a slot's losses to that of the parameters; the last slot's pass sends them."""
        steps, turn, count = self._steps, self._turn, len(slot)
        if turn is None:
            raise UsageError(f"slot {slot.number} of step {self.number} had its backward pass after step.finish()")
        losses = loss.expand(count) if loss.ndim == 0 else loss
        if losses.shape != (count,):
            raise UsageError(
                f"slot.backward was given a loss of shape {list(loss.shape)}; give the loss of each sample, [{count}], "
                "or their mean"
            )
        values = losses.detach()
        sums = steps.row.of(values, self._all_measures(turn, values, measures), torch.float32).detach()
        turn.outcomes.append(_Outcome(slot.samples, values, sums))
        steps.buffers.end_slot(slot.number)
        steps.mark("forward")
        if slot.is_last:
            self._send(turn)
        torch.autograd.backward(self._state.scaler.scale(losses), self._share.expand(count))
        steps.mark("backward")
        if slot.is_last:
            self._sent(turn)

    def _all_measures(self, turn: _Turn, losses: Tensor, measures: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the measures, with zeros for what the turns of other optimizers measure."""
        if not turn.name:
            return measures
        own = {**measures, loss_of(turn.name): losses}
        return {**{name: torch.zeros_like(losses) for name in self._steps.row.names if name not in own}, **own}

    def _send(self, turn: _Turn) -> None:
        """Send what is to travel with the gradients: the sums of all slots, and what this rank wants.

        The last backward pass sends the gradients as it makes them, so this must be there before it.
        """
        steps, outcomes = self._steps, turn.outcomes
        if outcomes:
            sums = reduce(operator.add, [outcome.sums for outcome in outcomes])
        else:
            sums = _constant((0.0,) * steps.row.size, steps.device)
        votes = self._votes
        wanted = votes.stop, votes.commit, votes.change, votes.end, votes.check, votes.recheck
        wishes = _constant(tuple(map(float, (*wanted, steps.buffers.has_news))), steps.device)
        words = [sums, wishes, *([self._fingerprint(outcomes)] if steps.ledger else [])]
        turn.num_words = sum(map(len, words))
        # In memory of its own: the sum over the ranks comes into it.
        message = torch.cat([*words, steps.times.told(self._told_in(turn)), *steps.buffers.changes])
        turn.pending = steps.world.sum_with_gradients(turn.optimizer, message)

    def _told_in(self, turn: _Turn) -> Sequence[float]:
        return self._times if turn.is_last else ()

    def _sent(self, turn: _Turn) -> None:
        self._steps.sums_in_passes.end_step()
        if turn.is_last:
            self._meanwhile()

    def _reduced_and_stepped(self, turn: _Turn, batch: Batch) -> StepResult:
        steps, state = self._steps, self._state
        optimizer, scaler = turn.optimizer, state.scaler
        if turn.pending is None:  # this rank has no slots
            self._send(turn)
            self._sent(turn)
        assert turn.pending is not None
        here.at("reduction")
        with steps.world.reduced(optimizer) as gradient:
            answer = turn.pending()
            self._wait_for_part()
            steps.mark("reduction")
            scaler.unscale_(optimizer)
            words, of_ranks, changes = answer.split_with_sizes(
                [turn.num_words, steps.times.size, len(answer) - turn.num_words - steps.times.size]
            )
            numbers, norm = gradient.read(words)
            times = steps.times.heard(of_ranks) if self._told_in(turn) and steps.times.size else None
            totals, agreed, news, taken = _understood(numbers, steps.row.size, batch.size)
            if news:
                steps.buffers.exchange_news(steps.world)
            # That was the last word of other ranks: from here on the step cannot break.
            skipped = not (math.isfinite(totals.loss) and math.isfinite(norm))  # on all ranks: both are sums over them
            if skipped:
                steps.buffers.undo()
            elif name := steps.row.not_finite(totals.sums):
                raise UsageError(f"step {self.number}: the task's measure {name} is not finite")
            else:
                steps.buffers.finish(changes, batch.num_slots)
                # The scaler's own step would ask the device whether all gradients are finite.
                gradient.take_step(self._clipping(norm))
            scaler.update()
        steps.mark("optimizer" if turn.is_last else "other")
        not_finite = _not_finite(turn.outcomes) if skipped else ()
        return StepResult(totals, agreed, norm if self._want_norm else None, skipped, taken, not_finite, times)

    def _undo(self) -> None:
        if self._turn is not None:
            self._end(self._turn)
        if self._num_turns:
            self._steps.buffers.undo()
            scaler = self._state.scaler
            scaler.update(scaler.get_scale())  # forgets that gradients were unscaled, and is as large
        if self._copy is not None:
            self._copy.put_back()

    def _fingerprint(self, outcomes: list[_Outcome]) -> Tensor:
        """Return the fingerprint of the samples that have come from this rank's loader, as numbers that add up."""
        samples = np.concatenate([np.zeros(0, np.int64), *[outcome.samples for outcome in outcomes]])
        device = self._steps.device
        on_host = torch.tensor(in_bytes(fingerprint(samples)), pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)  # else the host would wait for the forward pass

    def _clipping(self, norm: float) -> float | None:
        """Return the factor that brings the whole gradient, whose 2-norm is `norm`, to the largest one allowed."""
        if self._steps.clip_norm is None:
            return None
        # In fp32, as torch's clip_grads_with_norm_ has it, but on the host: it would wait for a copy of the norm.
        factor = float(self._steps.clip_norm / (torch.tensor(norm) + 1e-6))
        return factor if factor < 1 else None


def loss_of(optimizer: str) -> str:
    """Return the name of the measure that is the loss in the turns of one of several optimizers."""
    return f"loss_{optimizer}"


def _joined(results: list[StepResult]) -> StepResult:
    """Return the result of a step of several turns, of which each optimizer's last one counts."""
    last = results[-1]
    sums = tuple(map(sum, zip(*[result.totals.sums for result in results], strict=True)))
    norms = [result.gradient_norm for result in results if result.gradient_norm is not None]
    return replace(
        last,
        totals=Totals(sums, last.totals.count),
        gradient_norm=math.hypot(*norms) if norms else None,
        skipped=any(result.skipped for result in results),
        not_finite=tuple(sample for result in results for sample in result.not_finite),
    )


def _not_finite(outcomes: list[_Outcome]) -> tuple[int, ...]:
    """Return the numbers of this rank's samples whose loss is not finite."""
    return tuple(
        int(sample)
        for outcome in outcomes
        for sample, loss in zip(outcome.samples, outcome.losses.tolist(), strict=True)
        if not math.isfinite(loss)
    )


class Slot:
    """A micro-batch of a step, which goes through the model at once: its inputs and targets, trees of tensors."""

    def __init__(self, step: Step, micro: MicroBatch, *, is_last: bool) -> None:
        self._step, self._micro = step, micro
        self.is_last = is_last
        """Whether it is the last one of this rank in the step: its backward pass sends the gradients."""
        self.is_done = False
        """Whether it had its backward pass."""

    @property
    def data(self) -> Tree:
        """The items of the slot in a session: as the data set returns one, with tensors [n, ...] in place of values."""
        return self._micro.inputs

    @property
    def inputs(self) -> Tree:
        """The inputs, a tree of tensors [n, ...]."""
        return self._micro.inputs

    @property
    def targets(self) -> Tree:
        """The targets, a tree of tensors [n, ...]."""
        return self._micro.targets

    @property
    def samples(self) -> Indices:
        """The numbers of the samples in the data set, int64 [n]."""
        return self._micro.samples

    @property
    def number(self) -> int:
        """The number of the slot among those that all ranks have in the step, counted from 0."""
        return self._micro.number

    def __len__(self) -> int:
        return len(self._micro.samples)

    def backward(self, loss: Tensor, /, **measures: Tensor) -> None:
        """Add the gradient of the slot's loss to that of the step.

        `loss` holds the loss of each of the slot's n samples, [n], or their mean; the step follows the gradient of the
        mean over the whole global batch, however many slots and ranks that has. `measures`, [n] each, add up over all
        samples in the same way. Raises UsageError where it is called twice for a slot, or for tensors of other shapes.
        """
        if self.is_done:
            raise UsageError(
                f"slot {self.number} of step {self._step.number} had two backward passes: the gradients of the last "
                "slot travel beside its pass; add up the losses, and call slot.backward(loss) once"
            )
        self.is_done = True
        self._step._backward(self, loss, measures)


@cache
def _constant(value: float | tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers that come again in each step, to be read only: making a tensor takes longer than using it."""
    return torch.tensor(value, device=device)


def _understood(numbers: list[float], num_sums: int, count: int) -> tuple[Totals, Votes, bool, int | None]:
    """Return what the numbers say that travelled.

    These are the sums over `count` samples, what the ranks want, whether one of them has news of buffers, and the
    fingerprint of all samples if there is one.
    """
    stop, commit, change, end, check, recheck, news, *taken = numbers[num_sums:]
    votes = Votes(stop > 0, commit > 0, change > 0, end > 0, check > 0, recheck > 0)
    return Totals(tuple(numbers[:num_sums]), count), votes, news > 0, from_bytes(taken) if taken else None
