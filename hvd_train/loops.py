"""The loops of a training: epochs, steps and micro-batches, which continue after faults
and are counted and logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn
from typing_extensions import Self

from hvd_train import checkpoint, end, records
from hvd_train.data.loader import Loader
from hvd_train.data.trees import map_tensors
from hvd_train.errors import (
    PassesDiffer,
    RankLost,
    SumsOverflow,
    UsageError,
    first_few,
)
from hvd_train.history import HEAD, STEPS, TAIL, Place
from hvd_train.launch import stacks
from hvd_train.membership import Membership, Overtaken
from hvd_train.message import Votes
from hvd_train.network import buffers
from hvd_train.progress.order import Indices
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result, Stopped
from hvd_train.run_files.journal import TAKEN
from hvd_train.state import Answer, Evaluation, TrainState, set_values
from hvd_train.tasks.task import LOSS, Goal, Measure, Measures, Measuring, Scores, Task
from hvd_train.updater import Attempt, key_of
from hvd_train.world.world import World

IN_EVALUATION_MODE = (
    "the model was in evaluation mode when a step began: it is set to training mode at the begin "
    "of each step; a layer that should stay in evaluation mode needs eval() of its own"
)
DIFFERING_BUFFERS = (
    "each micro-batch of a step has its own changes of {}; only those of its first one are kept: "
    "see Buffers in docs/loops.md"
)
NOT_REGISTERED = (
    "a scheduler drives the optimizer and is not registered, so the learning rate would be wrong "
    "after a resume: session.register(scheduler=scheduler)"
)


class Loops:
    """The loops of a training. Its `with` block ends with the final files.

    Two kinds of places alternate. At a point, which the iterators come to, every rank holds a
    complete state: only there do ranks commit, stop, or admit others. In between runs the code of
    the program, with updates and evaluations of all ranks. After a fault there, each rank continues
    at its own place (`history`).
    """

    result: Result  # how the training ended, after the block

    def __init__(
        self,
        ranks: Membership,
        stop: StopSignal,
        models: Sequence[nn.Module] = (),
        *,
        is_users: bool = False,
    ) -> None:
        """`models` are those of a loop that `is_users`: it may write to them, or do
        something else on another rank.
        """
        self.ranks = ranks
        self.own = SimpleNamespace()  # the registered state
        self.writes = buffers.Writes(ranks.parts.model if is_users else nn.Module())
        self._stop = stop
        self._history = ranks.history
        self._is_users = is_users
        self._modes = buffers.Modes(models or [ranks.parts.model])
        self._figures: Mapping[str, float] | None = None  # of the evaluation of this epoch
        self._ends = ""  # why the loops end early
        # is called before each update
        self._before: Callable[[list[nn.Parameter]], object] | None = None
        self._attempt: Attempt | None = None  # at an update that is not recorded yet
        self._differing_step = -1  # the last one in which two ranks computed differently
        self._after_steps = False  # whether the steps of the epoch have ended in the program
        self._evaluations = set[tuple[object, ...]]()  # since the last point: place and name
        self._step: Step | None = None  # which the program is in
        self._closed = False
        self._told = dict[str, set[str]]()  # notes that the user has got, with their names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = error
        self._closed = True
        if error is None:
            try:
                self.joined()
                self._leave_step()
                self.result = self._finish()
            except BaseException as raised:  # noqa: BLE001
                # raised again below, after the last commit
                ended = raised
        self._step = None
        if ended is not None and self._attempt is not None:
            self._give_up(self._attempt)
        if ended is None or isinstance(ended, Stopped):
            end.report_end(self.ranks, self.result)
            if ended is None and not self.result.saved:
                raise Stopped(self.result.exit_code)
            return
        self.look_for_writes()
        final = end.end_with(ended, self.ranks, self._stop, self._attempt)
        if final is not error:
            raise final from (ended if final is not ended else ended.__cause__)

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left. Ends, and raises, as `Session.epochs` says."""
        if self._closed:
            raise UsageError("the session has ended: its loops belong into its `with` block")
        history = self._history
        state = self.joined()
        history.begin_at(state.point.place)
        while not self._is_over:
            if history.is_replayed:
                history.begin_epoch_again()
                self._after_steps = False
                set_values(self.own, state.point.own_at_epoch)
                if state.point.part == HEAD:
                    self._return_to_point()
            elif self._stays_at_last_epoch():
                return
            else:
                self._come_to(state.progress.epoch, HEAD)
            if state.point.part == HEAD and end.reason_to_end(self.ranks):
                return
            number = history.at.epoch
            yield Epoch(self, number)
            self._leave_step()
            is_complete = history.at.part == TAIL or not self._is_over
            # else this rank has got a state that is in the next epoch
            if is_complete and state.progress.epoch == number:
                records.end_epoch(self.ranks, self._figures)
            self._figures = None

    def _stays_at_last_epoch(self) -> bool:
        """Return whether the loop ends here; its last commit is then of a point before the
        code after the last step.

        A program of several trainings that repeats a finished one runs that code again, with
        recorded scores, and so has its values.
        """
        state = self.ranks.state
        if not self.ranks.name:
            return False
        self.look_for_writes()  # weights that this code has changed would be changed twice
        is_last = state.point.part == TAIL and end.reason_to_end(self.ranks)
        if not is_last or not self._history.is_whole:
            return False
        self._history.go_to(replace(state.point.place, epoch=state.progress.epoch, part=HEAD))
        return True

    @property
    def time_is_up(self) -> bool:
        """Whether the run has trained for as long as it may, in which all ranks agree."""
        return end.time_is_up(self.ranks)

    @property
    def _is_over(self) -> bool:
        """Whether the loops end here: by `stop`, or by the time limit within
        the epoch of this program.
        """
        return bool(self._ends) or (self.time_is_up and self._has_steps(self._history.at.epoch))

    def _has_steps(self, epoch: int) -> bool:
        """Return whether an epoch is the current one and has samples left."""
        progress = self.ranks.state.progress
        return progress.epoch == epoch and progress.cursor < self.ranks.batches.epoch_size

    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield the steps of an epoch that are left."""
        history = self._history
        state = self.joined()
        if history.begin_steps():
            set_values(self.own, state.point.own)
            self._return_to_point()
        self.ranks.clock.restart()
        self.ranks.batches.restart()
        self._after_steps = False
        # The last step before an end is answered from the record.
        while history.repeats_step(self.ranks.batches.epoch_size) or self._comes_to_step(epoch):
            step = self._step = Step(self, history.at)
            stacks.begin(step.number)
            if self._modes.begin_step():
                self._tell(IN_EVALUATION_MODE, [""])
            try:
                yield step
            except GeneratorExit:  # the program has left the loop
                if self._step is step:
                    self._leave_step()
                raise
            self._step = None
            step.end()
        self._after_steps = True
        if not self._is_over and history.at.part != TAIL:
            self._come_to(epoch, TAIL)

    def _return_to_point(self) -> None:
        """Take the state of the point at which this program begins: code that has run again may
        have changed it.
        """
        state = self.ranks.state
        self._arrive()
        state.set_settings(state.point.settings)
        state.set_trained(state.point)

    def _comes_to_step(self, epoch: int) -> bool:
        """Come to the next step of an epoch; return whether there is one."""
        if self._is_over or self._history.at.part == TAIL or not self._has_steps(epoch):
            return False
        self._come_to(epoch, STEPS)
        return True

    def _leave_step(self) -> None:
        """End the step whose loop the program has left, also if it keeps the iterator."""
        step = self._step
        self._step = None
        if step is None:
            return
        if step.answers and not self.in_step:
            step.end()
        self._after_steps = True

    def stop(self, why: str) -> None:
        """End the loops after this step or epoch. All ranks call it alike."""
        self._ends = why

    def call_before_updates(self, function: Callable[[list[nn.Parameter]], object]) -> None:
        """Call this function before each update (`Session.before_update`)."""
        self._before = function

    def evaluate(
        self,
        task: Task,
        measuring: Measuring,
        loader: Loader,
        name: str,
        facts: Mapping[str, str] | None = None,
    ) -> Scores:
        """Return the scores of a set, the same on every rank.

        Raises UsageError if `facts` of it differ, for a name that files cannot have, and for one
        that is used already.
        """
        ranks = self.ranks
        history = self._history
        of_epoch = name == "val" and self._after_steps
        self._take_name(name)
        if self.in_step:
            raise UsageError(
                "an evaluation within a step: call it after the loop over micro-batches"
            )
        state = self.joined()
        while not history.is_recorded:
            with self._surviving():
                self._begin_collective()
                stacks.begin(state.progress.step, "the evaluation after step")
                with ranks.clock.paused():
                    if facts is not None:
                        # at once, in an elastic job as well
                        World.compare(ranks.world, facts, "an evaluation")
                    scores = ranks.evaluate(task, measuring, loader)
                # the line of a whole epoch has the others
                shown = not (of_epoch and history.at.part == TAIL)
                ranks.output.journal.evaluation(name, scores, state.progress.step, shown=shown)
                self._record(Answer(scores))
        answer: Answer = history.take_result()
        if of_epoch:
            self._figures = answer.scores.figures
            state.end_evaluation(Evaluation(history.at.epoch + 1, self._figures))
        return answer.scores

    def _take_name(self, name: str) -> None:
        """Raise UsageError if scores cannot have this name, or have it already at
        this place of the program.
        """
        if not re.fullmatch(r"[^\W_][\w.-]*", str(name)) or name in TAKEN:
            raise UsageError(
                f"evaluate(name={name!r}) names scores: take another name, of "
                "letters, digits, '_' and '-'"
            )
        evaluation = (*self._history.at.label(-1), self._after_steps, name)
        if evaluation in self._evaluations:
            step = self.ranks.state.progress.step
            raise UsageError(
                f"two evaluations after step {step} have the name {name!r}: give "
                "each its own, name=..."
            )
        self._evaluations.add(evaluation)

    @property
    def figures(self) -> Mapping[str, float]:
        """The figures of the evaluation of this epoch, if there was one."""
        return self._figures or {}

    def keep_best(self, figures: Mapping[str, float], goal: Goal) -> bool:
        """Keep the weights as the best ones if the goal's figure is better than
        before; return whether it is.
        """
        state = self.joined()
        better = state.keep_best(Evaluation(self._history.at.epoch + 1, figures), goal)
        store = self.ranks.output.store
        if better and store is not None:
            store.save_weights(checkpoint.BEST, state)
        return better

    # What all ranks do together

    def joined(self) -> TrainState:
        """Return the state, once the ranks have met."""
        if not self.ranks.has_joined:
            self.ranks.join()
            if self._is_users:
                self.ranks.hold_state()
            self.writes.note()
        return self.ranks.state

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Meet the other ranks again if one is lost in this block.

        Raises as `Membership.meet` and `end.note_difference` do.
        """
        try:
            yield
        except RankLost as lost:
            if self._attempt is not None:
                self._attempt.undo()
                self._attempt = None
            self.ranks.meet(lost)
            self.writes.note()
        except (PassesDiffer, SumsOverflow) as error:
            assert self._attempt is not None
            self._attempt.undo()
            self._attempt = None
            if isinstance(error, PassesDiffer):
                self._differing_step = self.ranks.steps + 1
                end.note_difference(self.ranks, error)

    def _begin_collective(self) -> None:
        """Come to an update or evaluation of all ranks. Raises as `Membership.compare` does."""
        self.look_for_writes()
        self._history.begin_collective()
        self._arrive()
        self.ranks.compare(self.own)

    def _record(
        self, answer: Answer, agreed: Agreed | None = None, *, is_whole: bool = True
    ) -> None:
        """Note what an update or evaluation has given."""
        self._history.record(answer, agreed, is_whole=is_whole)
        self._attempt = None
        updater = self.ranks.updater
        if updater.buffers.differing:
            self._tell(DIFFERING_BUFFERS, sorted(updater.buffers.differing))
        for note, attributes in updater.changed.items():
            self._tell(note, [*attributes])
        if self._is_users and agreed is not None and NOT_REGISTERED not in self._told:
            is_registered = any(hasattr(each, "step") for each in vars(self.own).values())
            if self.ranks.state.has_scheduler and not is_registered:
                self._tell(NOT_REGISTERED, [""])
        self.writes.note()

    def _tell(self, note: str, names: Sequence[str]) -> None:
        """Tell the user a note with the names that it has not been told with."""
        if new := [name for name in names if name not in self._told.get(note, ())]:
            self._told.setdefault(note, set()).update(new)
            self.ranks.output.journal.event("note", note.format(first_few(new, 3)))

    def _arrive(self) -> None:
        if self.ranks.arrive():
            self.writes.note()

    def look_for_writes(self) -> None:
        """Note whether the program has written to weights or buffers."""
        if self.writes.found():
            self._history.spoil()

    def _come_to(self, epoch: int, part: int) -> None:
        """Come to a point, and do what the ranks have agreed on."""
        ranks = self.ranks
        state = self.joined()
        state.come_to(epoch, part, self.own)
        self._after_steps = self._after_steps and part == TAIL
        self._evaluations.clear()
        ranks.come_to_point()
        self.writes.note()
        agreed = self._history.take_agreed()
        if agreed is not None:
            self._do_agreed(*agreed)
        # once an epoch: code may have done something else on another rank
        if self._is_users and part == HEAD:
            ranks.expect_differences()

    def _do_agreed(self, last: Answer, agreed: Votes) -> None:
        """Give up, stop, commit or change the world, as the ranks have voted in the last update."""
        ranks = self.ranks
        if end.has_diverged(ranks.state) or agreed.stop:
            with self._surviving():  # another world votes again
                self._end_early(last)
            return
        if agreed.commit and not self._commit():
            return
        if agreed.change:
            ranks.meet()
            self.writes.note()
        else:
            ranks.profile.step_done(ranks.state.progress.step)

    def _commit(self) -> bool:
        """Commit the state that all ranks hold; return False if a rank was lost meanwhile."""
        ranks = self.ranks
        is_same_world = False
        with self._surviving():
            end.compare_states(ranks, "a commit")
            store = ranks.output.store
            if store is None or store.commit(ranks.state, verified=True):
                ranks.clock.commits.reset()
            is_same_world = True
        return is_same_world  # noqa: RET504  # the block may end early

    def _end_early(self, last: Answer) -> None:
        """Commit, and raise Diverged or Stopped. Raises RankLost."""
        if end.has_diverged(self.ranks.state):
            end.give_up(self.ranks, last)
        self.result = end.write_final_files(self.ranks, self._stop, finished=False)
        raise Stopped(self.result.exit_code)

    def _finish(self) -> Result:
        """Write the final files, in as many worlds as it takes."""
        try:
            while True:
                self._history.begin_collective()
                self._arrive()
                with self._surviving():
                    why = self._ends or "the loop has ended"
                    return end.write_final_files(self.ranks, self._stop, finished=True, why=why)
        except Overtaken as over:  # this rank alone does not know of the end yet
            return replace(over.result, run_dir=self.ranks.output.path)

    # Updates

    def update(self, step: Step, optimizers: Sequence[str]) -> Generator[MicroBatch, None, Answer]:
        """Yield this rank's micro-batches of an update, again after each
        fault; return its result.
        """
        is_only = optimizers == ("",)
        if self.in_step or step.is_over or (is_only and step.answers):
            raise UsageError(f"step {step.number}: its micro-batches come once, in one loop")
        while not self._history.is_recorded:
            with self._surviving():
                self._begin_collective()
                taken, agreed = yield from self._passes(step, optimizers)
                if is_only:
                    records.count_step(self.ranks, taken)
                self._record(taken, (taken, agreed), is_whole=is_only)
        answer: Answer = self._history.take_result()
        return answer

    @property
    def in_step(self) -> bool:
        """Whether the program runs passes of a step."""
        return self._attempt is not None

    def _passes(self, step: Step, optimizers: Sequence[str]) -> Generator[MicroBatch, None, Agreed]:
        """Attempt an update once. Raises RankLost."""
        ranks = self.ranks
        ranks.clock.split.mark("other")
        batch = ranks.batches.next(step.epoch - 1)
        turn = sum(earlier == key_of(optimizers) for earlier, _ in step.answers)
        is_again = self._differing_step == step.number
        attempt = ranks.updater.begin(
            ranks.state, batch, self._votes(), optimizers, turn, is_again=is_again
        )
        self._attempt = attempt
        measuring = attempt.measuring
        if not (measuring.fields or batch.micro_batches):
            # A rank without a micro-batch must know which measures the others sum.
            example = ranks.parts.train_loader.example(2)
            with attempt.rehearsal():
                yield MicroBatch(
                    partial(measuring.checked, num_samples=2), 0, example, np.arange(2)
                )
        for micro in batch.passes:
            attempt.start(micro)
            own = map_tensors(micro.batch, lambda tensor: tensor)  # the program may change a dict
            take = attempt.recheck if micro is batch.rechecked else attempt.backward
            mine = MicroBatch(take, micro.number, own, micro.samples)
            yield mine
            if attempt.lost is not None:
                raise attempt.lost
            if not mine.done:
                raise UsageError(
                    f"step {step.number}: micro.backward was not called: give samples that do "
                    "not count a loss of 0, or leave them out of the data"
                )
        done = attempt.finish(ranks.batches.prepare, self._before)
        # a rank alone has none to compare with
        if attempt.has_compared or ranks.world.place.size == 1:
            ranks.state.trust(step.number)
        return done

    def _give_up(self, attempt: Attempt) -> None:
        """Undo what the passes of a step have changed that does not end."""
        attempt.undo()
        self.writes.note()
        if attempt.has_changed_state:
            self._history.spoil()

    def _votes(self) -> Votes:
        """Return the votes of this rank for the end of the next step."""
        ranks = self.ranks
        every = ranks.config.run.commit_steps
        by_steps = every is not None and (ranks.state.progress.step + 1) % every == 0
        # as long as the last checkpoint is being written, ranks need not compare
        store = ranks.output.store
        by_time = ranks.clock.commits.due and store is not None and store.is_free
        got_signal = self._stop.received is not None
        request = ranks.world.requested(got_signal=got_signal)
        return Votes(
            stop=request == "stop",
            commit=by_steps or by_time or (got_signal and request == "change"),
            change=request == "change",
            seconds=ranks.clock.seconds if ranks.world.place.rank == 0 else 0.0,
        )


Agreed = tuple[Answer, Votes]
"""The result of an update, and what the ranks have decided with it for the next point."""


class Epoch:
    """The steps of an epoch; `number` counts from 1."""

    def __init__(self, loops: Loops, number: int) -> None:
        self._loops = loops
        self.number = number + 1

    def __iter__(self) -> Iterator[Step]:
        return self._loops.steps(self.number - 1)


class Update:
    """An update of the weights by one optimizer, which is done when the loop over
    its micro-batches has ended.
    """

    scores: Scores
    skipped: bool  # whether loss or gradient was not finite, so that nothing changed
    gradient_norm: float  # before it was clipped

    def __init__(self, loops: Loops, step: Step, optimizers: Sequence[str]) -> None:
        self._loops = loops
        self._step = step
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches.

        If a rank is lost, they come again, divided among the others.
        """
        self._step.check(self._optimizers)
        answer = yield from self._loops.update(self._step, self._optimizers)
        self._step.answers.append((key_of(self._optimizers), answer))
        self.scores = answer.scores
        self.skipped = answer.skipped
        self.gradient_norm = answer.gradient_norm


class Step(Update):
    """One step: a loop over its micro-batches; with several optimizers, a loop
    over each of its updates.
    """

    def __init__(self, loops: Loops, at: Place) -> None:
        super().__init__(loops, self, ("",))
        layout = loops.ranks.state.layout
        num_samples = loops.ranks.batches.epoch_size
        self.size = len(layout.batches(range(at.cursor, num_samples))[0])  # samples of all ranks
        self.number = at.step + 1  # both count from 1
        self.epoch = at.epoch + 1
        # epochs done in the middle of the step
        self.position = at.epoch + (at.cursor + self.size / 2) / num_samples
        self._cursor = at.cursor
        self.answers: list[tuple[str, Answer]] = []  # of the updates that all ranks have done
        self.is_over = False

    def update(self, *optimizers: str) -> Update:
        """Return the next update by one of several optimizers, or by some at once, over the
        micro-batches of this step.

        Parameters of the other optimizers have no gradient meanwhile. Each optimizer may do any
        number of updates: all of them see the same samples, and the first ones also the same random
        numbers.
        """
        self.check(optimizers)
        return Update(self._loops, self, optimizers)

    @property
    def samples(self) -> Indices:
        """The numbers of the samples of all ranks in the set, int64 [size], in
        the order of `Scores.each`.
        """
        return self._loops.ranks.batches.samples_of(self.epoch - 1, self._cursor, self.size)

    def end(self) -> None:
        """End the step.

        With several optimizers it counts now, unless this rank got a state that has it.
        """
        self.is_over = True
        if self._loops.in_step or not self.answers:
            raise UsageError(
                f"step {self.number}: its loop over micro-batches did not run to its end"
            )
        state = self._loops.ranks.state
        if "" not in state.optimizers and state.progress.step < self.number:
            records.count_step(self._loops.ranks, records.of_updates(self.answers, self.size))
            self._loops.writes.note()

    def check(self, optimizers: Sequence[str]) -> None:
        """Raise UsageError if a step has no update by these optimizers."""
        names = self._loops.ranks.state.optimizers
        if not optimizers or len({*optimizers} & names.keys()) < len(optimizers):
            known = (
                " or ".join(f"step.update({name!r})" for name in names)
                if "" not in names
                else "the step"
            )
            raise UsageError(f"step {self.number}: iterate over {known}")


class MicroBatch:
    """A micro-batch of a step: `batch` is on the device, `samples` has the numbers
    of its samples in the set.
    """

    __slots__ = ("_take", "batch", "done", "number", "samples")

    def __init__(
        self, take: Callable[[Measures], object], number: int, batch: Any, samples: Indices
    ) -> None:
        self._take = take
        self.number = number
        self.batch = batch
        self.samples = samples
        self.done = False

    def __len__(self) -> int:
        return len(self.samples)

    def backward(self, loss: Measure, **measures: Measure) -> None:
        """Run the backward pass; call it once for each micro-batch. It never raises RankLost.

        `loss` has one number for each sample, or is a `Mean`; so have other measures, which are
        summed over all ranks and written down. Raises UsageError for other shapes or names than in
        the first micro-batch.
        """
        if self.done:
            raise UsageError("micro.backward was called twice for one micro-batch: add the losses")
        self.done = True
        self._take({LOSS: loss, **measures})
