"""One optimizer step: passes over this rank's micro-batches, then reduce, unscale, clip, step."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train import recheck
from hvd_train.config import Config
from hvd_train.errors import PassesDiffer, RankLost, SumsOverflow, UsageError
from hvd_train.message import Message, Votes
from hvd_train.network import attributes, optim
from hvd_train.network.buffers import StepBuffers
from hvd_train.network.device import arithmetic, autocast, seed
from hvd_train.network.gradients import multiply, norm_of
from hvd_train.network.normalization import sums_of_layers
from hvd_train.progress import order
from hvd_train.progress.clock import Split
from hvd_train.progress.order import Batch, MicroBatch, fingerprint, from_bytes, in_bytes
from hvd_train.progress.pace import Pace
from hvd_train.recheck import Pass, Passes
from hvd_train.state import Answer, TrainState
from hvd_train.tasks.task import (
    LOSS,
    Measures,
    Measuring,
    Scores,
    kept_of,
    nearest_exponent,
    numbers_of,
    sum_of,
    totals_in,
    totals_of,
)
from hvd_train.world import known_answer
from hvd_train.world.exact import ExactSums
from hvd_train.world.world import Gradients, World, own_gradients

_WATCHED_UPDATES = 3
# separate random numbers of a micro-batch and of an optimizer from other uses of the seed
MICRO_BATCH = 3
UPDATE = 4


Named = dict[str, nn.Parameter]


class Updater:
    """Updates the weights once a step: `begin` returns an attempt.

    It holds settings, but no progress.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        device: torch.device,
        measuring: dict[str, Measuring],
        split: Split | None = None,
    ) -> None:
        """`measuring` is what the updates of each optimizer measure; `split` measures the time."""
        self.world = world
        self.device = device
        self.keys = {kind: order.key(config.seed, kind) for kind in (MICRO_BATCH, UPDATE)}
        self.ledger = config.run.ledger
        self.clip_norm = config.optimizer.clip_norm
        self.split = split or Split()
        self.mark = self.split.mark
        self.pace = Pace(world.place.size if world.place.size > 1 else 0)
        self.autocast = autocast(config, device)
        self.rounding = recheck.rounding(arithmetic(config, device))
        is_exact = config.precision.is_exact
        self.sums = ExactSums(world) if is_exact else None
        self.buffers = StepBuffers(model, device, is_exact=is_exact)
        self.sums_of_layers = sums_of_layers(model, world)
        self.sums_of_layers.mark = self.mark
        self._model = model
        self._measurings = measuring
        self._parameters = list[nn.Parameter]()
        # by update: ids, the parameters by name, and a digest
        self._trained: dict[str, tuple[list[int], Named, tuple[float, ...]]] = {}
        self._watched_updates = _WATCHED_UPDATES + 1
        # whether this is one of the first updates, which look for what other code changes
        self.is_watched = True
        # notes for the user, each with the names in it, such as the attributes that passes change
        self.changed = dict[str, dict[str, None]]()
        # of the last update, if it was watched, with their versions
        self._last_gradients = list[tuple[nn.Parameter, Tensor, int]]()

    def take(
        self, state: TrainState, batch: Batch, meanwhile: Callable[[], None] = lambda: None
    ) -> Answer:
        """Take one step with all ranks; the weights change, the progress does not
        (`TrainState.count_step`).

        `meanwhile` is called while gradients are reduced. Raises RankLost and UsageError before the
        state changes.
        """
        try:
            attempt = self.begin(state, batch, Votes())
            for micro in batch.micro_batches:
                attempt.start(micro)
                attempt.backward(attempt.measuring.function(state.model, micro.batch))
            return attempt.finish(meanwhile)[0]
        except SumsOverflow:
            attempt.undo()
            return self.take(state, batch, meanwhile)
        except (ValueError, RuntimeError) as error:
            if (advice := advice_for(error, batch)) is None:
                raise
            raise advice from None

    def begin(
        self,
        state: TrainState,
        batch: Batch,
        votes: Votes,
        names: Sequence[str] = ("",),
        turn: int = 0,
        *,
        is_again: bool = False,
    ) -> Attempt:
        """Begin an attempt at the next update of `state`, with this rank's part of its samples.

        `is_again`: two ranks have computed a micro-batch of this step differently before.

        The optimizers of these names have done `turn` updates in this step. Parameters of the
        others get no gradient meanwhile. Raises RankLost, and UsageError as
        `_check_last_gradients` does.
        """
        name = key_of(names)
        if name not in self._measurings:
            first = self._measurings[names[0]]
            self._measurings[name] = Measuring(first.function, of_a_loop=first.of_a_loop)
        trained: list[nn.Parameter] = []  # `list[...]()` takes ten times as long
        fixed: list[nn.Parameter] = []
        for each, optimizer in state.optimizers.items():
            (trained if each in names else fixed).extend(
                parameter for parameter in optim.parameters_of(optimizer) if parameter.requires_grad
            )
        self._check_last_gradients()
        trains_others = self._note_trained(name, trained, state)
        _, named, digest = self._trained[name]
        for parameter in self._parameters:
            parameter.grad = None
        # More passes than there are, so that no gradient is summed before it has been noted.
        more = 2 * batch.is_rechecked
        self.world.begin_update(trained, len(batch.micro_batches) + more)
        if self.sums is not None:
            self.sums.begin(name, named, batch.num_micro_batches, state.exponents)
        self.sums_of_layers.begin_step(len(batch.micro_batches), batch.num_micro_batches)
        self.buffers.begin(batch.num_micro_batches)
        self._watched_updates = max(0, self._watched_updates - 1)
        self.is_watched = self._watched_updates > 0
        optimizers = [state.optimizers[each] for each in names]
        of = Trained(
            name,
            turn,
            optimizers,
            self._measurings[name],
            trained,
            fixed,
            self._parameters,
            digest,
            trains_others,
        )
        return Attempt(self, state, batch, votes, of, is_again=is_again)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter in the model."""
        names = (name for name, each in self._model.named_parameters() if each is parameter)
        return next(names)

    def times_of_ranks(self) -> Tensor:
        """Return the times of this rank, [ranks * pace.FIELDS], with zeros for the others."""
        times = torch.zeros(self.pace.shape)
        times[self.world.place.rank] = torch.tensor(self.split.times())
        return times.flatten().to(self.device, non_blocking=True)

    def _note_trained(self, name: str, trained: Sequence[nn.Parameter], state: TrainState) -> bool:
        """Return whether the trained parameters are others than in the
        last update; check them then.
        """
        ids = [*map(id, trained)]
        if name in self._trained and self._trained[name][0] == ids:
            return False
        optim.check_parameters(self._model, state.optimizers)
        self._parameters = [*self._model.parameters()]
        mine = set(ids)
        named = {
            each: parameter
            for each, parameter in self._model.named_parameters()
            if id(parameter) in mine
        }
        digest = xxhash.xxh3_64_intdigest("\n".join(named).encode())
        bits = tuple(float(digest >> place & 1) for place in range(16))
        self._trained[name] = ids, named, bits
        return True

    def note_last_gradients(self) -> None:
        """Note the gradients of an update that has ended, if it is watched."""
        if self.is_watched:
            self._last_gradients = [
                (parameter, parameter.grad, parameter.grad._version)
                for parameter in self._parameters
                if parameter.grad is not None
            ]

    def _check_last_gradients(self) -> None:
        """Raise UsageError if other code has written to gradients since the
        update that has used them.
        """
        if any(
            parameter.grad is not None
            and (parameter.grad is not gradient or gradient._version != version)
            for parameter, gradient, version in self._last_gradients
        ):
            raise UsageError(
                "gradients have changed after their update, which has no effect: clip by "
                "--clip-norm, or change them in session.before_update; for gradients of "
                "your own call torch.autograd.grad"
            )
        self._last_gradients = []

    def watched(self, thing: nn.Module | Optimizer, what: str) -> AbstractContextManager[None]:
        """Note which plain attributes of a model or an optimizer `what` changes in this
        block, if the update is watched.
        """
        return self._watching(thing, what) if self.is_watched else nullcontext()

    @contextmanager
    def _watching(self, thing: nn.Module | Optimizer, what: str) -> Iterator[None]:
        before = attributes.values_of(thing)
        yield
        if before and (names := attributes.changed(before, attributes.values_of(thing))):
            self.changed.setdefault(what, {}).update(dict.fromkeys(names))


@dataclass(frozen=True)
class Trained:
    """What an update trains."""

    name: str  # of the update, by its optimizers
    turn: int  # the updates of the same optimizers in this step before it
    optimizers: Sequence[Optimizer]
    measuring: Measuring
    parameters: Sequence[nn.Parameter]  # of these optimizers
    fixed: Sequence[nn.Parameter]  # of the others
    all: Sequence[nn.Parameter]  # of the model
    digest: tuple[float, ...]  # of the names of the trained ones, in bits
    are_others: bool  # than in the last update by the same optimizers


class Attempt:
    """One attempt at an update: `start` and `backward` for each micro-batch, then `finish`.

    If a rank is lost, `undo` restores what the passes have changed, and another attempt begins.
    """

    def __init__(
        self,
        updater: Updater,
        state: TrainState,
        batch: Batch,
        votes: Votes,
        trained: Trained,
        *,
        is_again: bool,
    ) -> None:
        """Hold the parameters of other optimizers fixed until `finish` or `undo`."""
        self.batch = batch
        self.measuring = trained.measuring
        self.lost: RankLost | None = None  # noticed in a pass
        self.has_changed_state = False
        self._updater = updater
        self._state = state
        self._votes = votes
        self._trained = trained
        self._forward = ExitStack()  # what a forward pass runs in
        self._sums_of_passes: list[Tensor] = []
        self._kept: list[Kept] = []
        # of a step in which ranks compare micro-batches: the own one, and that of another rank
        self._own: Pass | None = None
        self._other: Pass | None = None
        self._is_again = is_again
        self.has_compared = False  # whether ranks have computed the same in this update
        # gradients of each term of the loss, if several
        self._of_terms: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._held_fixed = trained.fixed
        for parameter in self._held_fixed:
            parameter.requires_grad_(False)
        self._note_gradients()

    @property
    def _is_last(self) -> bool:
        """Whether this is the last micro-batch of this rank."""
        micro_batches = self.batch.micro_batches
        return bool(micro_batches) and self._micro is micro_batches[-1]

    def start(self, micro: MicroBatch) -> None:
        """Begin the forward pass of a micro-batch: from the same buffers and
        random numbers on any rank.
        """
        updater = self._updater
        self._micro = micro
        if self._is_last:
            updater.sums_of_layers.begin_last_micro_batch()
        updater.buffers.begin_micro_batch()
        turn = self._trained.turn
        again = (turn,) if turn else ()
        step = self._state.progress.step
        start = updater.keys[MICRO_BATCH]
        seed(updater.device, order.key(step, micro.number, *again, after=start))
        self._forward.enter_context(updater.autocast)
        if updater.is_watched:
            self._forward.enter_context(updater.watched(self._state.model, attributes.IN_PASSES))

    def backward(self, measures: Measures) -> None:
        """End the forward pass, which gave these measures, and run the backward pass.

        The last one starts the reduction of each gradient. If a rank is lost, `finish` raises it.
        Raises UsageError for other measures than the task's.
        """
        updater = self._updater
        measuring = self.measuring
        self._forward.close()
        self._check_gradients()
        measures = measuring.checked(measures, len(self._micro.samples))
        self._sums_of_passes.append(numbers_of(measures, measuring.means, measuring.dtype))
        if measuring.keeps:
            self._kept.append((self._micro.number, totals_in(measures), kept_of(measures)))
        updater.buffers.end_micro_batch(self._micro.number)
        updater.mark("forward")
        try:
            if self._is_last:
                self._send_message()
            if len(measuring.terms) > 1:
                scaler = self._state.scaler
                self._backward_of_terms(
                    [scaler.scale(sum_of(measures[term.name])) for term in measuring.terms]
                )
            else:
                self._backward_of_loss(measures)
            self.lost = self.lost or updater.sums_of_layers.lost
            if self.batch.is_rechecked and self._micro is self.batch.micro_batches[0]:
                self._own = self._noted()
            self._end_pass()
        except RankLost as error:
            self.lost = error
        self._note_gradients()
        updater.mark("backward")

    def _end_pass(self) -> None:
        """Add up the gradients of a backward pass. Raises RankLost."""
        updater = self._updater
        if updater.sums is None:
            if not self._is_last:
                updater.world.end_pass()
            return
        updater.sums.end_pass()
        if self._is_last:
            updater.sums.start()

    def _backward_of_loss(self, measures: Measures) -> None:
        # The ranks' gradients are added. As `grad_tensors` the share would make torch import sympy.
        loss = self._state.scaler.scale(sum_of(measures[LOSS])) * self._share(0)
        torch.autograd.backward(loss)

    def recheck(self, measures: Measures) -> None:
        """End the forward pass of a micro-batch of another rank, run its backward pass, and note
        the gradients, which count for that rank.
        """
        updater = self._updater
        self._forward.close()
        measures = self.measuring.checked(measures, len(self._micro.samples))
        if len(self.measuring.terms) == 1:
            self._backward_of_loss(measures)
        self._other = self._noted()
        for parameter in self._trained.all:
            parameter.grad = None
        updater.buffers.put_back()
        self._note_gradients()
        updater.mark("backward")

    def _noted(self) -> Pass | None:
        """Return the gradients of a pass, unless another rank could not compute them again."""
        # Those of several terms are added up in the last pass; and what a pass leaves in attributes
        # of the model may change the next one.
        is_pure = attributes.IN_PASSES not in self._updater.changed
        if len(self.measuring.terms) > 1 or not is_pure:
            why = "passes change attributes" if not is_pure else "the loss has several Means"
            self._updater.changed.setdefault(recheck.NOT_COMPARED, {})[why] = None
            return None
        return recheck.noted(self._micro.number, self._trained.parameters)

    def _compare_passes(self) -> None:
        """Raise PassesDiffer on all ranks if two of them have computed a micro-batch differently.

        Raises RankLost.
        """
        updater = self._updater
        machine = recheck.machine_of(updater.device)
        is_right = not self._is_again or known_answer.is_right(updater.device)
        mine = Passes(machine, self._is_again, is_right, self._own, self._other)
        of_ranks = updater.world.gather(mine, "a step")
        self.has_compared = any(passes.other for passes in of_ranks)
        found = recheck.differences(of_ranks, updater.rounding)
        if not found:
            return
        largest = max(found, key=lambda difference: difference.size)
        wrong = recheck.wrong_rank(found, of_ranks)
        name = updater.name_of(self._trained.parameters[largest.parameter])
        raise PassesDiffer(
            f"micro-batch {largest.number} of step {self._state.progress.step + 1} (by "
            f"{largest.size:.1e} of the gradient's norm, in {name})",
            largest.ranks if wrong is None else [wrong],
            is_again=recheck.is_again(of_ranks),
        )

    def _exponent(self, term: int) -> int:
        """Return the power of two near the count of a term of the loss for each
        sample, as far as it is known.
        """
        return self._state.exponents.get(
            key_of_term(self._trained.name, term), self.measuring.exponent if term == 0 else 0
        )

    def _share(self, term: int) -> Tensor:
        """Return what a backward pass multiplies a sum by, so that half
        precision can hold the gradient.
        """
        share = 2.0 ** -self._exponent(term) / self.batch.size
        return _constant(share, self._updater.device, self.measuring.dtype)

    def _backward_of_terms(self, terms: Sequence[Tensor]) -> None:
        """Run a backward pass for each term of the loss; in the last micro-batch one
        for all, by their counts.

        Raises: RankLost; UsageError: if layers of other ranks would wait for a pass of this one
        meanwhile, and for exact sums.
        """
        if self._updater.sums is not None:
            raise UsageError("--reduction exact needs a loss of one Mean, not a sum of several")
        if self._is_last:
            factors = self._factors_of_terms()
            self._add_up_terms(factors)
            weighted = [term * factor for term, factor in zip(terms, factors, strict=True)]
            torch.autograd.backward(reduce(operator.add, weighted))
            return
        if self._updater.sums_of_layers.is_used:
            raise UsageError(
                "--sync-batch-norm with a loss of several Means needs a single micro-batch on each "
                "rank: leave out --accumulation-steps, or give one Mean"
            )
        parameters = self._trained.parameters
        for number, term in enumerate(terms):
            if not term.requires_grad:
                continue
            is_last = number == len(terms) - 1
            share = self._share(number).view_as(term)
            gradients = torch.autograd.grad(
                term, parameters, share, retain_graph=not is_last, allow_unused=True
            )
            mine = self._of_terms.setdefault(number, {})
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    mine[parameter] = mine[parameter] + gradient if parameter in mine else gradient

    def _factors_of_terms(self) -> list[Tensor]:
        """Return what each term of the loss is multiplied by, once all ranks have sent
        their counts. Raises RankLost.

        A term without any count in the step is left out.
        """
        self._updater.mark("backward")
        measures = self._message.sum()[self._message.at.measures]
        self._updater.mark("reduction")
        num_samples = _constant(float(self.batch.size), self._updater.device, self.measuring.dtype)
        counts = [num_samples if at is None else measures[at] for at in self.measuring.counts_at]
        return [(1 / count).masked_fill(count <= 0, 0.0) for count in counts]

    def _add_up_terms(self, factors: Sequence[Tensor]) -> None:
        """Make one gradient of those of the terms in the micro-batches so far."""
        for number, of_term in self._of_terms.items():
            for parameter, gradient in of_term.items():
                weighted = gradient * (factors[number] / self._share(number))
                parameter.grad = weighted if parameter.grad is None else parameter.grad + weighted

    def _note_gradients(self) -> None:
        if self._updater.is_watched:
            gradients = [parameter.grad for parameter in self._trained.all]
            self._gradients = [
                (gradient, gradient._version) for gradient in gradients if gradient is not None
            ]

    def _check_gradients(self) -> None:
        """Raise UsageError in the first updates if other code has changed a
        gradient since the last pass.
        """
        if self._updater.is_watched:
            before = [(id(gradient), version) for gradient, version in self._gradients]
            self._note_gradients()
            if before != [(id(gradient), version) for gradient, version in self._gradients]:
                raise UsageError(
                    "gradients have changed between micro-batches: leave out "
                    "loss.backward(), zero_grad() and clipping (--clip-norm does it); "
                    "micro.backward(loss) runs the backward pass"
                )

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside this block run a forward pass that counts for nothing, without other ranks."""
        updater = self._updater
        with updater.sums_of_layers.rehearsal(), updater.autocast:
            yield
        updater.buffers.put_back()

    def undo(self) -> None:
        """Undo what the passes have changed, unless the update has ended."""
        self._forward.close()
        self._updater.buffers.put_back()
        self._release()

    def _release(self) -> None:
        for parameter in self._held_fixed:
            parameter.requires_grad_()
        self._held_fixed = ()

    def _send_message(self) -> None:
        """Start the sum that travels with the gradients."""
        updater = self._updater
        samples: Sequence[float] = ()
        if updater.ledger:
            mine = np.concatenate(
                [np.zeros(0, np.int64), *[micro.samples for micro in self.batch.micro_batches]]
            )
            samples = in_bytes(fingerprint(mine))
        self._message = Message(
            updater.world,
            self._measured(),
            self._votes,
            updater.buffers.others_changed,
            self._trained.digest,
            samples,
            [updater.times_of_ranks()] if updater.pace.is_due else [],
            updater.buffers.changes,
        )

    def _measured(self) -> Tensor:
        """Return the sums of the measures on this rank or, for exact sums, a row for each
        micro-batch of all ranks, with zeros for other ranks.
        """
        updater = self._updater
        passes = self._sums_of_passes
        num_sums = self.measuring.num_sums
        if updater.sums is None:
            if passes:
                return reduce(operator.add, passes)
            return _constant((0.0,) * num_sums, updater.device, self.measuring.dtype)
        rows = torch.zeros(
            self.batch.num_micro_batches,
            num_sums,
            dtype=self.measuring.dtype,
            device=updater.device,
        )
        for micro, numbers in zip(self.batch.micro_batches, passes, strict=True):
            rows[micro.number] = numbers
        return rows

    def finish(
        self,
        meanwhile: Callable[[], None],
        before: Callable[[list[nn.Parameter]], object] | None = None,
    ) -> tuple[Answer, Votes]:
        """Reduce, unscale, clip, step; return also what at least one rank has voted for.

        Raises RankLost.

        `meanwhile` is called while gradients are reduced, and `before` with the parameters that
        have a gradient, which is the mean over all samples then, before it is clipped.
        """
        updater = self._updater
        buffers = updater.buffers
        if self.lost is not None:
            raise self.lost
        self._check_gradients()
        if not self.batch.micro_batches:
            self._send_message()
            if updater.sums is not None:
                updater.sums.start()
        updater.mark("other")
        updater.sums_of_layers.end_step(updater.device)
        meanwhile()

        message = self._message.sum()
        self._check_trained_alike(message)
        gradients = (updater.sums or updater.world).reduce()
        if self.batch.is_rechecked:
            self._compare_passes()
        is_alone = updater.world.place.size == 1
        if buffers.others and not is_alone and message[self._message.at.other_buffers] > 0:
            buffers.broadcast_others(updater.world)
        kept: OfSamples = ({}, {})
        if self.measuring.keeps:
            kept = of_all_micro_batches(updater.world.gather(self._kept))
        # No communication follows, so the step cannot break any more.
        updater.mark("reduction")
        numbers = self._step(gradients, message, before)
        return self._end(kept, *numbers())

    def _step(
        self,
        gradients: Gradients,
        message: Tensor,
        before: Callable[[list[nn.Parameter]], object] | None,
    ) -> Numbers:
        """Unscale and clip the gradients, and take a step, unless loss or gradient are not finite.

        Return a function that reads the norm, the loss scale and the message.
        """
        updater = self._updater
        state = self._state
        batch = self.batch
        measuring = self.measuring
        scaler = state.scaler
        optimizers = self._trained.optimizers
        sent = self._message
        # A GPU decides itself whether to skip, so it has work while the host waits for the numbers.
        ahead = (
            updater.device.type == "cuda"
            and not updater.buffers.others
            and before is None
            and all(map(optim.can_skip_on_device, optimizers))
        )
        # On a GPU a fused optimizer unscales and clips in its own pass over the gradients. It
        # divides, which rounds a clip in another way: CPUs keep their arithmetic.
        in_one_pass = (
            ahead
            and measuring.dtype == torch.float32
            and all(map(optim.divides_gradients, optimizers))
        )
        scale = scaler.scale(_constant(1.0, updater.device))
        scaled = [*filter(_has_gradients, optimizers)] if scaler.is_enabled() else []
        for optimizer in () if in_one_pass else scaled:
            scaler.unscale_(optimizer)
        # The gradient of a single term is divided by the samples so far.
        by_count = len(measuring.terms) == 1 and measuring.means[0].kind == "count"
        factor = batch.size * 2.0 ** self._exponent(0) / message[1] if by_count else None
        limit = updater.clip_norm if before is None else None
        norm, factor = self._norm(gradients, factor, limit, scale if in_one_pass else None)
        divisor = None
        if not in_one_pass:
            multiply(gradients, factor)
        elif factor is not None or scaler.is_enabled():
            divisor = scale if factor is None else scale / factor
        numbers = _begin_to_read(norm, scale, message[: sent.changes], sent.of_host)
        changes = message[sent.changes :]
        found_inf = None
        if ahead:
            total = message[: measuring.num_of_loss].sum() + norm
            broken = (total - total) != 0  # not finite, in fewer launches
            changes = changes.masked_fill(broken, 0)
            found_inf = broken.float()
        turn = self._trained.turn
        start = updater.keys[UPDATE]
        seed(updater.device, order.key(state.progress.step, turn, after=start))
        if ahead or self._is_finite(*numbers()):
            self.has_changed_state = True
            updater.buffers.finish(changes, batch.num_micro_batches)
            if before is not None:
                self._call_before_update(before)
            for optimizer in optimizers:
                with updater.watched(optimizer, attributes.IN_STEPS):
                    state.take_step(optimizer, found_inf=found_inf, grad_scale=divisor)
        else:
            updater.buffers.put_back()
        if scaled:
            if in_one_pass and found_inf is not None:
                scaler.note(found_inf)
            scaler.update()
        return numbers

    def _call_before_update(self, before: Callable[[list[nn.Parameter]], object]) -> None:
        """Let code of the user change the gradients, and clip them afterwards."""
        before([parameter for parameter in self._trained.all if parameter.grad is not None])
        own = own_gradients(self._trained.all)
        multiply(own, self._norm(own, None, self._updater.clip_norm)[1])

    def _is_finite(self, norm: float, _: float, message: list[float]) -> bool:
        """Return whether loss and gradient are finite: on all ranks, since both are their sums."""
        return math.isfinite(sum(message[: self.measuring.num_of_loss]) + norm)

    def _end(
        self, kept: OfSamples, norm: float, loss_scale: float, message: list[float]
    ) -> tuple[Answer, Votes]:
        """End the update, and return its result and the votes by the summed message."""
        updater = self._updater
        state = self._state
        batch = self.batch
        at = self._message.at
        sums = message[at.measures]
        totals = totals_of(self.measuring.means, sums, batch.size)
        exponents = {
            key_of_term(self._trained.name, term): nearest_exponent(sums[place] / batch.size)
            for term, place in enumerate(self.measuring.counts_at)
            if place is not None and sums[place] > 0
        }
        self._release()
        updater.note_last_gradients()
        updater.split.end_update([len(micro.samples) for micro in batch.micro_batches])
        stop, commit, change = (vote > 0 for vote in message[at.votes])
        [seconds] = message[at.seconds]
        if updater.pace.is_due:
            updater.pace.add(np.array(message[at.times]))
        updater.pace.come_to(seconds)
        if updater.sums is not None:
            exponents |= updater.sums.exponents
        state.end_update(seconds, exponents)
        answer = Answer(
            Scores(totals.means(), totals.count, *kept),
            totals,
            skipped=not self._is_finite(norm, loss_scale, message),
            gradient_norm=norm,
            fingerprint=from_bytes(message[at.samples]) if updater.ledger else None,
            loss_scale=loss_scale if state.scaler.is_enabled() else 0.0,
        )
        return answer, Votes(stop, commit, change, seconds)

    def _check_trained_alike(self, message: Tensor) -> None:
        """Raise UsageError on all ranks if they train different parameters: each digit is
        then 1 on some ranks only.
        """
        size = self._updater.world.place.size
        is_on_gpu = self._updater.device.type != "cpu"  # to read it a GPU would wait
        if size == 1 or (is_on_gpu and not self._trained.are_others):
            return
        if any(0 < digit < size for digit in message[self._message.at.trained].tolist()):
            raise UsageError(
                f"step {self._state.progress.step + 1}: ranks train different parameters; code "
                "that freezes, thaws or adds parameters must do the same on all ranks"
            )

    def _norm(
        self,
        gradients: Gradients,
        factor: Tensor | None,
        limit: float | None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the 2-norm of the gradients times `factor`, [] float64, and what to multiply
        them by, so that they are clipped as well. `scale` is the loss scale that they still have.
        """
        # Horovod knows the squares from the second update on, and adds them up in another way, so a
        # clip that used them would round differently after a resume.
        if gradients.squares is not None and limit is None and not self._state.scaler.is_enabled():
            root = math.sqrt(gradients.squares)
            norm = torch.tensor(root, dtype=torch.float64, device=self._updater.device)
        else:
            norm = norm_of(gradients, self._updater.device)
        if scale is not None:
            norm = norm / scale
        if factor is not None:
            norm = norm * factor
        if limit is not None:  # as torch's clip_grad_norm_
            clip = (limit / (norm.to(self.measuring.dtype) + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else clip * factor
        return norm, factor


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optim.parameters_of(optimizer))


def key_of(names: Sequence[str]) -> str:
    """Return the name of an update by the optimizers of these names."""
    return "_".join(names)


def key_of_term(update: str, number: int) -> str:
    """Return the name of a term of the loss of an update, in `TrainState.exponents`."""
    return f"{update}+{number}" if number else update


OfSamples = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Totals, and values of each sample, by name."""
Kept = tuple[int, dict[str, Tensor], dict[str, Tensor]]
"""The number of a micro-batch with its totals and its values of each sample, by name."""


def of_all_micro_batches(of_ranks: Sequence[Sequence[Kept]]) -> OfSamples:
    """Return the sum of the totals over all micro-batches, and the values of
    all samples, in their order.
    """
    in_order = sorted(chain.from_iterable(of_ranks), key=operator.itemgetter(0))
    _, totals, values = zip(*in_order, strict=True)
    summed = {name: reduce(operator.add, [each[name] for each in totals]) for name in totals[0]}
    joined = {name: torch.cat([each[name] for each in values]) for name in values[0]}
    return summed, joined


@cache
def _constant(
    value: float | tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    # to make one takes longer than to use it
    return torch.tensor(value, dtype=dtype, device=device)


def advice_for(error: Exception, batch: Batch) -> UsageError | None:
    """Return what to type if an error of torch in a pass comes from the settings, else None."""
    if isinstance(error, torch.OutOfMemoryError):
        images = len(batch.micro_batches[0].samples)
        passes = len(batch.micro_batches)
        peak = torch.cuda.max_memory_allocated() / 2**30
        less = (
            f"type --batch-size {images // 2} --accumulation-steps {2 * passes}, which "
            "keeps the global batch"
        )
        more = less if images > 1 else "type a smaller --image-size or --model"
        return UsageError(
            f"out of GPU memory in a micro-batch of {images} (peak {peak:.1f} GiB): {more}"
        )
    if "more than 1 value per channel" in str(error):
        return UsageError(
            "batch norm needs two samples in each micro-batch: type a larger --batch-size"
        )
    if "does not require grad" in str(error):
        return UsageError(
            "the loss depends on no trained parameter: leave out detach() and "
            "no_grad(), or freeze less"
        )
    if "does not have a deterministic implementation" in str(error):
        operation = str(error).partition(" ")[0]
        return UsageError(
            f"{operation} has no deterministic version: leave out --deterministic, or --reduction "
            "exact"
        )
    return None


Numbers = Callable[[], tuple[float, float, list[float]]]
"""Returns the norm of the gradient, the loss scale and the summed message."""


def _begin_to_read(
    norm: Tensor, scale: Tensor, message: Tensor, of_host: Sequence[float]
) -> Numbers:
    """Begin to copy these numbers to the host, which has the rest of the message already.

    The returned function waits for them, not for work that is queued later.
    """
    if message.device.type != "cuda":
        read = norm.item(), scale.item(), [*message.tolist(), *of_host]
        return lambda: read
    arriving = torch.cat((norm[None], scale[None], message)).to("cpu", non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> tuple[float, float, list[float]]:
        copied.synchronize()
        norm, scale, *message = arriving.tolist()
        return norm, scale, [*message, *of_host]

    return wait
