"""The loops of a training: epochs, steps and micro-batches, which continue after faults and are counted and logged."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn
from typing_extensions import Self

from hvd_train import checkpoint
from hvd_train.data.loader import Loader
from hvd_train.data.trees import map_tensors
from hvd_train.errors import Diverged, RankLost, UsageError
from hvd_train.network import optim
from hvd_train.network.buffers import Modes
from hvd_train.network.device import peak_memory_gib
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Indices
from hvd_train.result import Result, Stopped
from hvd_train.run_files.journal import TAKEN, EpochRecord, StepRecord
from hvd_train.run_files.ledger import Entry, extended
from hvd_train.state import HEAD, START, STEPS, TAIL, Answer, Evaluation, Point, TrainState, set_values
from hvd_train.tasks.task import LOSS, Goal, Measure, Measures, Measuring, Scores, Task
from hvd_train.training import Overtaken, Training
from hvd_train.updater import key_of
from hvd_train.world.world import World, result_of_rank_0

MOST_SKIPPED_STEPS = 10
"""In a row; then a run ends with an error."""
IN_EVALUATION_MODE = (
    "the model was in evaluation mode when a step began: it is set to training mode at the begin of each step; "
    "a layer that should stay in evaluation mode needs eval() of its own"
)


class Loops:
    """The loops of a training. Its `with` block ends with the final files.

    Two kinds of places alternate. At a point, which the iterators come to, the state is whole for any rank: there ranks
    commit, stop, and let others in. In between runs the code of the program, with updates and evaluations of all ranks.
    After a fault there, each rank continues at its own place; `_collective` says how.
    """

    result: Result  # how the training ended, after the block

    def __init__(self, training: Training) -> None:
        self.training = training
        self._own = SimpleNamespace()
        self._at = Point()  # the last point of this rank's program
        self._count = 0  # updates and evaluations since then
        self._resumed: Point | None = None  # of the others or a checkpoint, until the program comes there
        self._scores: Scores | None = None  # of the epoch
        self._ends = ""  # why the loops end early
        self._before: Callable[[list[nn.Parameter]], object] | None = None  # is called before each update
        self._in_step = False  # whether the program runs passes of a step
        self._after_steps = False  # whether the steps of the epoch have ended in the program
        self._place: tuple[int, ...] = ()  # of the last evaluation
        self._names = set[str]()  # of the evaluations there
        self._step: Step | None = None  # which the program is in
        self._closed = False
        self._modes = Modes([training.parts.model])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        training = self.training
        ended = error
        self._closed = True
        if error is None:
            try:
                training.join()
                self._leave_step()
                self.result = self._finish()
            except BaseException as raised:  # noqa: BLE001  # raised again below, after the last commit
                ended = raised
        self._step = None
        if ended is not None and self._in_step:
            training.undo_step()
        if ended is None or isinstance(ended, Stopped):
            training.ended_with(self.result)
            if ended is None and not self.result.saved:
                raise Stopped(self.result.exit_code)
            return
        final = training.end_with(ended)
        if final is not error:
            raise final from (ended if final is not ended else ended.__cause__)

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left; the first one may have begun.

        They end after the last epoch, after `stop`, or as `--max-time`, `--patience` or `--target` say. Raises:
        Stopped: after a commit, if the training was asked to stop; RankLost: if no other world can form; Diverged: if
        many steps in a row have a loss or a gradient that is not finite.
        """
        if self._closed:
            raise UsageError("the session has ended: its loops belong into its `with` block")
        training, state = self._joined()
        if state.point.part != START:
            self._resumed = state.point
        while not self._is_over:
            if self._resumed is None and self._stays_at_last_epoch():
                return
            if self._resumed is None:
                self._come_to(state.progress.epoch, HEAD)
            else:
                self._at = Point(self._resumed.epoch, HEAD)
                self._count = 0
                self._after_steps = False
                set_values(self._own, self._resumed.own_at_epoch)
            if state.point.part == HEAD and training.why():
                return
            number = self._at.epoch
            yield Epoch(self, number)
            self._leave_step()
            if self._at.part == TAIL or not self._is_over:
                _end_epoch(training, number, self._scores)
            self._scores = None

    def _stays_at_last_epoch(self) -> bool:
        """Return whether the loop ends here; its last commit is then of a point before the code after the last step.

        A program of several trainings that repeats a finished one runs that code again, with recorded scores, and so
        has its values.
        """
        training = self.training
        state = self.training.state
        if not training.name:
            return False
        training.look_for_writes()  # weights that this code has changed would be changed twice
        if state.point.part != TAIL or not training.is_whole or not training.why():
            return False
        self._at = replace(state.point, epoch=state.progress.epoch, part=HEAD)
        self._count = 0
        return True

    @property
    def _is_over(self) -> bool:
        """Whether the loops end here, or within the epoch that this rank and its program are in."""
        training, progress = self.training, self.training.state.progress
        within = progress.epoch == self._at.epoch and progress.cursor < training.epoch_size
        return bool(self._ends) or (within and training.time_is_up)

    def _steps(self, epoch: int) -> Iterator[Step]:
        training, state = self._joined()
        num_samples = training.epoch_size
        resumed = self._resumed
        self._resumed = None
        if resumed is not None and resumed.part == HEAD:
            resumed = None
        elif resumed is not None:
            self._at = resumed
            self._count = 0
            set_values(self._own, resumed.own)
            state.set_settings(resumed.settings)  # the code at the head of the epoch may have set them again
            state.set_trained(resumed)
        training.begin_epoch()
        self._after_steps = False
        while resumed is not None or not self._is_over:  # the last step before an end is answered from the record
            if resumed is None and state.progress.epoch == epoch and state.progress.cursor < num_samples:
                self._come_to(epoch, STEPS)
            elif resumed is None or resumed.part != STEPS or resumed.cursor >= num_samples:
                break
            resumed = None
            step = self._step = Step(self, self._at)
            if self._modes.begin_step():
                training.output.journal.event("note", IN_EVALUATION_MODE)
            try:
                yield step
            except GeneratorExit:  # the program has left the loop
                if self._step is step:
                    self._leave_step()
                raise
            self._step = None
            step.end()
        self._after_steps = True
        if not self._is_over and (resumed is None or resumed.part != TAIL):
            self._come_to(epoch, TAIL)

    def _leave_step(self) -> None:
        """End the step whose loop the program has left, also if it keeps the iterator."""
        step = self._step
        self._step = None
        if step is None:
            return
        if step.answers and not self._in_step:
            step.end()
        self._after_steps = True

    def _evaluate(
        self, task: Task, measuring: Measuring, loader: Loader, name: str, facts: Mapping[str, str] | None = None
    ) -> Scores:
        """Return the scores of a set, the same on every rank.

        Raises UsageError if `facts` of it differ, for a name that files cannot have, and for one that is used already.
        """
        training = self.training
        of_epoch = name == "val" and self._after_steps
        self._take_name(name)

        def act() -> Answer:
            with training.stopwatch.paused():
                if facts is not None:
                    World.compare(training.world, facts)  # at once, in an elastic job as well
                scores = training.evaluate(task, measuring, loader, training.state.result)
            training.split.restart()
            shown = not (of_epoch and self._at.part == TAIL)  # the line of a whole epoch has the others
            training.output.journal.evaluation(name, scores, training.state.progress.step, shown=shown)
            return Answer(scores)

        scores = self._collective(act).scores
        if of_epoch:
            self._scores, training.state.last = scores, Evaluation(self._at.epoch + 1, scores.figures)
        return scores

    def _take_name(self, name: str) -> None:
        """Raise UsageError if scores cannot have this name, or have it already at this place of the program."""
        if not re.fullmatch(r"[^\W_][\w.-]*", str(name)) or name in TAKEN:
            raise UsageError(
                f"evaluate(name={name!r}) names scores: take another name, of letters, digits, '_' and '-'"
            )
        place = *self._at.label(-1), self._after_steps
        if place != self._place:
            self._place = place
            self._names = set()
        if name in self._names:
            step = self.training.state.progress.step
            raise UsageError(f"two evaluations after step {step} have the name {name!r}: give each its own, name=...")
        self._names.add(name)

    def _keep_best(self, figures: Mapping[str, float], goal: Goal) -> bool:
        """Keep the weights as the best ones if the goal's figure is better than before; return whether it is."""
        training, state = self._joined()
        better = state.best is None or goal.better(figures[goal.name], state.best.figures[goal.name])
        if better:
            state.best = Evaluation(self._at.epoch + 1, figures)
            if (store := training.output.store) is not None:
                store.save_weights(checkpoint.BEST, state)
        return better

    # What all ranks do together

    def _joined(self) -> tuple[Training, TrainState]:
        self.training.join()
        return self.training, self.training.state

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """After a RankLost in this block, undo passes of a step, and meet the other ranks. Raises as `meet` does."""
        try:
            yield
        except RankLost as error:
            self.training.updater.undo()
            self.training.meet(error)

    def _collective(self, act: Callable[[], Answer]) -> Answer:
        """Do something with all ranks, again after each fault, or return what others have recorded of it."""
        training, state = self._joined()
        if self._in_step:
            raise UsageError("an evaluation within a step: call it after the loop over micro-batches")
        label = self._at.label(self._count)
        while label not in state.answers:
            with self._surviving():
                training.begin(label, self._own)
                training.record(label, act())
        self._count += 1
        return state.answers[label]

    def _come_to(self, epoch: int, part: int) -> None:
        """Come to a point: the state is whole for any rank. Do what the ranks have agreed on."""
        training, state = self._joined()
        state.come_to(epoch, part, self._own)
        self._at = state.point
        self._count = 0
        self._after_steps = self._after_steps and part == TAIL
        training.come_to(state.point.label(-1))
        training.note_writes()
        training.is_whole = True
        update = training.last_update
        training.last_update = None
        if update is None:
            return
        answer, agreed = update
        changes = False
        with self._surviving():
            _give_up_if_diverged(training, answer)
            if agreed.stop:
                self.result = training.finish(finished=False)
                raise Stopped(self.result.exit_code)
            store = training.output.store
            if agreed.commit and (store is None or store.commit(state)):
                training.commit_timer.reset()
            if not agreed.change:
                training.split.mark("other")
                training.profile.step_done(state.progress.step)
            changes = agreed.change
        if changes:
            training.meet()

    def _finish(self) -> Result:
        training = self.training
        try:
            while True:
                training.catch_up(self._at.label(self._count))
                with self._surviving():
                    return training.finish(finished=True, why=self._ends or "the loop has ended")
        except Overtaken as over:  # this rank alone does not know of the end yet
            return replace(over.result, run_dir=training.output.path)


class TaskLoops(Loops):
    """The loops of a training that evaluates the task of its config."""

    def evaluate(self) -> Scores:
        """Return the scores on the validation set."""
        parts = self.training.parts
        assert parts.val_loader is not None
        return self._evaluate(parts.task, parts.evaluation, parts.val_loader, "val")

    def keep_best(self, scores: Scores) -> bool:
        """Keep the weights as the best ones if these scores are better than before; return whether they are."""
        return self._keep_best(scores.figures, self.training.parts.goal)


class Epoch:
    """The steps of an epoch; `number` counts from 1."""

    def __init__(self, session: Loops, number: int) -> None:
        self._session = session
        self._index = number
        self.number = number + 1

    def __iter__(self) -> Iterator[Step]:
        return self._session._steps(self._index)


class Update:
    """An update of the weights by one optimizer, which is done when the loop over its micro-batches has ended."""

    scores: Scores
    skipped: bool  # whether loss or gradient was not finite, so that nothing changed
    gradient_norm: float  # before it was clipped

    def __init__(self, session: Loops, step: Step, optimizers: Sequence[str]) -> None:
        self._session = session
        self._step = step
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches. If a rank is lost, they come again, divided among the others."""
        session = self._session
        training = self._session.training
        step = self._step
        step._check(self._optimizers)
        is_only = self._optimizers == ("",)
        name = key_of(self._optimizers)
        if session._in_step or step.is_over or (is_only and step.answers):
            raise UsageError(f"step {step.number}: its micro-batches come once, in one loop")
        state = training.state
        label = session._at.label(session._count)
        turn = sum(earlier == name for earlier, _ in step.answers)
        while label not in state.answers:
            with session._surviving():
                training.begin(label, session._own)
                session._in_step = True
                batch = training.next_batch(step.epoch - 1)
                attempt = training.updater.begin(state, batch, training.votes(), self._optimizers, turn)
                measuring = attempt.measuring
                if not (measuring.fields or batch.micro_batches):
                    # A rank without a micro-batch must know which measures the others sum.
                    example = training.parts.train_loader.example(2)
                    two = np.arange(2)
                    with attempt.rehearsal():
                        yield MicroBatch(partial(measuring.checked, num_samples=2), 0, example, two)
                for micro in batch.micro_batches:
                    attempt.start(micro)
                    own = map_tensors(micro.batch, lambda tensor: tensor)  # the program may change a dict
                    yield (mine := MicroBatch(attempt.backward, micro.number, own, micro.samples))
                    if attempt.lost is not None:
                        raise attempt.lost
                    if not mine.done:
                        raise UsageError(f"step {step.number}: micro.backward was not called")
                training.last_update = answer, agreed = attempt.finish(training.prepare_next_batch, session._before)
                state.seconds = agreed.seconds
                if is_only:
                    _count_step(training, answer)
                training.record(label, answer)
                training.is_whole = training.is_whole and is_only
        session._count = session._count + 1
        session._in_step = False
        answer = state.answers[label]
        step.answers.append((name, answer))
        self.scores = answer.scores
        self.skipped = answer.skipped
        self.gradient_norm = answer.gradient_norm


class Step(Update):
    """One step: a loop over its micro-batches; with several optimizers, a loop over each of its updates."""

    def __init__(self, session: Loops, at: Point) -> None:
        super().__init__(session, self, ("",))
        training = session.training
        layout = training.state.layout
        num_samples = training.epoch_size
        self.size = len(layout.batches(range(at.cursor, num_samples))[0])  # samples of all ranks
        self.number = at.step + 1  # both count from 1
        self.epoch = at.epoch + 1
        self.position = at.epoch + (at.cursor + self.size / 2) / num_samples  # epochs done in the middle of the step
        self._cursor = at.cursor
        self.answers = list[tuple[str, Answer]]()  # of the updates that all ranks have done
        self.is_over = False

    def update(self, *optimizers: str) -> Update:
        """Return the next update by one of several optimizers, or by some at once, over the micro-batches of this step.

        Parameters of the other optimizers have no gradient meanwhile. Each optimizer may do any number of updates: all
        of them see the same samples, and the first ones also the same random numbers.
        """
        self._check(optimizers)
        return Update(self._session, self, optimizers)

    @property
    def samples(self) -> Indices:
        """The numbers of the samples of all ranks in the set, int64 [size], in the order of `Scores.each`."""
        return self._session.training.samples_of(self.epoch - 1, self._cursor, self.size)

    def end(self) -> None:
        """End the step. With several optimizers it counts now, unless this rank got a state that has it."""
        training = self._session.training
        self.is_over = True
        if self._session._in_step or not self.answers:
            raise UsageError(f"step {self.number}: its loop over micro-batches did not run to its end")
        if "" not in training.state.optimizers and training.state.progress.step < self.number:
            _count_step(training, _of_updates(self.answers, self.size))
            training.note_writes()

    def _check(self, optimizers: Sequence[str]) -> None:
        names = self._session.training.state.optimizers
        if not optimizers or len({*optimizers} & names.keys()) < len(optimizers):
            known = " or ".join(f"step.update({name!r})" for name in names) if "" not in names else "the step"
            raise UsageError(f"step {self.number}: iterate over {known}")


class MicroBatch:
    """A micro-batch of a step: `batch` is on the device, `samples` has the numbers of its samples in the set."""

    __slots__ = ("_take", "batch", "done", "number", "samples")

    def __init__(self, take: Callable[[Measures], object], number: int, batch: Any, samples: Indices) -> None:
        self._take = take
        self.number = number
        self.batch = batch
        self.samples = samples
        self.done = False

    def __len__(self) -> int:
        return len(self.samples)

    def backward(self, loss: Measure, **measures: Measure) -> None:
        """Run the backward pass; call it once for each micro-batch. It never raises what befalls other ranks.

        `loss` has one number for each sample, or is a `Mean`; so have other measures, which are summed over all ranks
        and written down. Raises UsageError for other shapes or names than in the first micro-batch.
        """
        if self.done:
            raise UsageError("micro.backward was called twice for one micro-batch: add the losses")
        self.done = True
        self._take({LOSS: loss, **measures})


def _count_step(training: Training, result: Answer) -> None:
    """Count a step that all ranks have done, show it, and write it down."""
    state = training.state
    stopwatch = training.stopwatch
    num_samples = training.epoch_size
    state.count_step(result.totals, skipped=result.skipped, loss_scale=result.loss_scale)
    stopwatch.step(result.totals.count)
    journal = training.output.journal
    progress = state.progress
    speed = stopwatch.samples_per_second
    if result.fingerprint is not None:
        # It is summed with the gradients, so every rank that has finished a step has its entry. This drops the entries
        # of the epoch before. Their lines are on disk: all ranks have begun this step.
        positions = progress.cursor - result.totals.count, progress.cursor
        entry = Entry(progress.epoch, (progress.step,) * 2, training.world.place.size, positions, result.fingerprint)
        state.recent = extended(state.recent, entry, num_samples)
        journal.took(state.recent[-1])
    means = state.totals.means()
    so_far = EpochRecord(progress.epoch + 1, progress.step, means, None, speed, total_seconds=training.seconds)
    journal.progress(so_far, progress.cursor)
    change = training.membership.change
    if change is not None and progress.step == change.step + 1:
        journal.world(change, progress.step, time.perf_counter() - training.membership.left_at)
    if result.skipped and not math.isfinite(result.totals.sums[LOSS]):
        journal.event("skipped", f"step {progress.step} is skipped: its loss is not finite", step=progress.step)
    if progress.step % training.config.run.log_steps == 0:
        state.last_step = StepRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            samples=progress.epoch * num_samples + progress.cursor,
            measures=result.totals.means(),
            learning_rate=optim.learning_rate_of(state.optimizer),
            gradient_norm=result.gradient_norm,
            loss_scale=state.scaler.get_scale() if state.scaler.is_enabled() else None,
            skipped_steps=progress.skipped,
            samples_per_second=speed,
            split=training.split.take(),
            gpu=training.gpu_load(),
        )
        journal.step(state.last_step)


def _of_updates(answers: Sequence[tuple[str, Answer]], num_samples: int) -> Answer:
    """Return the result of a step of several updates, given by the optimizer's name and what all ranks know of it.

    Its loss is the mean over the updates; the measures of each have the optimizer's name in front.
    """
    totals = Totals(num_samples)
    for optimizer, answer in answers:
        sums, divisors = (
            {LOSS: values[LOSS], **{f"{optimizer}_{name}": value for name, value in values.items()}}
            for values in (answer.totals.sums, answer.totals.divisors)
        )
        totals += Totals(0, sums, divisors)  # all updates see the same samples
    skipped = all(answer.skipped for _, answer in answers)
    norm = math.hypot(*(a.gradient_norm for _, a in answers))
    scores = Scores(totals.means(), num_samples)
    last = answers[-1][1]
    return Answer(scores, totals, skipped, norm, last.fingerprint, last.loss_scale)


def _give_up_if_diverged(training: Training, result: Answer) -> None:
    """If too many steps in a row were skipped, commit the weights, which they have not changed, and raise Diverged."""
    progress = training.state.progress
    if progress.skipped_in_row < MOST_SKIPPED_STEPS:
        return
    saved = result_of_rank_0(training.world, training.output.commit_last(training.state))
    finite = math.isfinite(result.totals.sums[LOSS])
    cause = "the loss is finite, but not its gradient" if finite else "the loss is not finite"
    kept = "committed" if saved else "NOT committed (see above)"
    raise Diverged(
        f"{progress.skipped_in_row} steps in a row were skipped; in the last one, step {progress.step}, {cause}; "
        f"the weights are those before them, and {kept}; try a smaller --learning-rate or --clip-norm"
    )


def _end_epoch(training: Training, number: int, scores: Scores | None) -> None:
    """Log epoch `number` (from 0) and begin the next one, unless this rank got a state that is in the next one."""
    state = training.state
    if state.progress.epoch != number:
        return
    seconds = training.seconds
    before = state.last_epoch.total_seconds if state.last_epoch else 0.0
    state.last_epoch = EpochRecord(
        epoch=number + 1,
        step=state.progress.step,
        measures=state.totals.means(),
        scores=scores.figures if scores else None,
        samples_per_second=training.stopwatch.samples_per_second,
        seconds=round(seconds - before, 3),
        total_seconds=round(seconds, 3),
        peak_memory_gib=round(peak_memory_gib(training.parts.device), 3),
    )
    training.output.journal.epoch(state.last_epoch)
    state.progress = replace(state.progress, epoch=number + 1, cursor=0)
    state.totals = Totals()
