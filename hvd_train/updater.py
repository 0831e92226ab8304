"""One optimizer step: passes over this rank's micro-batches, then reduce, unscale, clip, step."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from hvd_train.config import Config
from hvd_train.errors import RankLost, UsageError
from hvd_train.network import optim
from hvd_train.network.buffers import StepBuffers
from hvd_train.network.device import autocast, seed
from hvd_train.network.normalization import sums_of_layers
from hvd_train.progress import order
from hvd_train.progress.clock import Split
from hvd_train.progress.order import Batch, MicroBatch, fingerprint, from_bytes, in_bytes
from hvd_train.state import Answer, TrainState
from hvd_train.tasks.task import LOSS, Measures, Measuring, Scores, kept_of, numbers_of, sum_of, totals_in, totals_of
from hvd_train.world.world import Gradients, World, own_gradients

_WATCHED_UPDATES = 3
_PIECE = 1 << 18  # elements
MICRO_BATCH, UPDATE = 3, 4  # separate random numbers of a micro-batch and of an optimizer from other uses of the seed


@dataclass(frozen=True)
class Votes:
    """The votes of one rank at the end of a step; one decides for all."""

    stop: bool = False  # end the training, with a commit
    commit: bool = False  # write a checkpoint
    change: bool = False  # continue in another world
    seconds: float = 0.0  # of training so far; only rank 0 says so


_BUFFERS_CHANGED = 3  # the place of this flag after the votes
_TRAINED = slice(5, 5 + 16)  # the places of the digest of the trained parameters, after votes and seconds


class Updater:
    """Updates the weights once a step: `begin`, then `start` and `backward` for each micro-batch, then `finish`.

    It holds settings and what has been done of the update, but no progress. After a RankLost, `put_back` undoes what
    passes have changed, and the update begins again.
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
        self._mark, self._measurings = (split or Split()).mark, measuring
        self._world, self._device, self._seed = world, device, config.seed
        self._ledger, self._clip_norm = config.run.ledger, config.optimizer.clip_norm
        self._autocast = autocast(config, device)
        self._buffers = StepBuffers(model, device)
        self._sums_of_layers = sums_of_layers(model, world)
        self._forward = ExitStack()  # what a forward pass runs in
        self.lost: RankLost | None = None  # noticed in a pass of this update
        self._held_fixed: list[nn.Parameter] = []  # of other optimizers, in this update
        self._model = model
        self._parameters = list[nn.Parameter]()
        self._trained: dict[str, tuple[list[int], tuple[float, ...]]] = {}  # by optimizer: ids, and a digest
        self._watched_updates = _WATCHED_UPDATES

    def take(self, state: TrainState, batch: Batch, meanwhile: Callable[[], None] = lambda: None) -> Answer:
        """Take one step with all ranks; the weights change, the progress does not (`TrainState.count_step`).

        `meanwhile` is called while gradients are reduced. Raises RankLost and UsageError before the state changes.
        """
        try:
            self.begin(state, batch, Votes())
            for micro in batch.micro_batches:
                self.start(micro)
                self.backward(self._measuring.function(state.model, micro.batch))
            return self.finish(meanwhile)[0]
        except (ValueError, RuntimeError) as error:
            if (advice := of_use(error, batch)) is None:
                raise
            raise advice from None

    def begin(
        self, state: TrainState, batch: Batch, votes: Votes, names: Sequence[str] = ("",), turn: int = 0
    ) -> Measuring:
        """Begin the next update of `state` with this rank's part of its samples; return what it measures.

        The optimizers of these names have done `turn` updates in this step. Parameters of the others get no gradient
        meanwhile. Raises RankLost.
        """
        self._state, self.batch, self._votes = state, batch, votes
        self._name = key_of(names)
        self._optimizers = [state.optimizers[name] for name in names]
        self._turn = turn
        if self._name not in self._measurings:
            first = self._measurings[names[0]]
            self._measurings[self._name] = Measuring(first.function, of_a_loop=first.of_a_loop)
        self._measuring = self._measurings[self._name]
        self.lost = None
        self._sums_of_passes: list[Tensor] = []
        self._kept: list[Kept] = []
        self._of_terms: dict[int, dict[nn.Parameter, Tensor]] = {}  # gradients of each term of the loss, if several
        self._exponent = state.exponents.get(self._name, self._measuring.exponent)

        trained = list[nn.Parameter]()
        fixed = list[nn.Parameter]()
        for name, optimizer in state.optimizers.items():
            (trained if name in names else fixed).extend(
                parameter for parameter in optim.parameters_of(optimizer) if parameter.requires_grad
            )
        self._trained_now = trained
        self._note_trained(trained)
        for parameter in self._parameters:
            parameter.grad = None
        self._held_fixed = fixed
        for parameter in self._held_fixed:
            parameter.requires_grad_(False)
        self._world.begin_update(trained, len(batch.micro_batches))
        self._sums_of_layers.begin_step(len(batch.micro_batches), batch.num_micro_batches)
        self._buffers.begin()
        self._watched_updates -= 1
        self._note_gradients()
        return self._measuring

    def _note_trained(self, trained: Sequence[nn.Parameter]) -> None:
        """Check the trained parameters, and compute their digest, if they are others than in the update before."""
        ids = [*map(id, trained)]
        self._trains_others = self._name not in self._trained or self._trained[self._name][0] != ids
        if not self._trains_others:
            return
        optim.check_parameters(self._model, self._state.optimizers)
        self._parameters = [*self._model.parameters()]
        mine = set(ids)
        names = [name for name, parameter in self._model.named_parameters() if id(parameter) in mine]
        digest = xxhash.xxh3_64_intdigest("\n".join(names).encode())
        bits = tuple(float(digest >> place & 1) for place in range(16))
        self._trained[self._name] = ids, bits

    def start(self, micro: MicroBatch) -> None:
        """Begin the forward pass of a micro-batch: from the same buffers and random numbers on any rank."""
        self._micro = micro
        if micro is self.batch.micro_batches[-1]:
            self._sums_of_layers.begin_last_micro_batch()
        self._buffers.put_back()
        again = (self._turn,) if self._turn else ()
        seed(self._device, order.key(self._seed, MICRO_BATCH, self._state.progress.step, micro.number, *again))
        self._forward.enter_context(self._autocast)

    def backward(self, measures: Measures) -> None:
        """End the forward pass, which gave these measures, and run the backward pass.

        The last one starts the reduction of each gradient. If a rank is lost, `finish` raises it. Raises UsageError for
        other measures than the task's.
        """
        self._forward.close()
        self._check_gradients()
        measures = self._measuring.checked(measures, len(self._micro.samples))
        self._sums_of_passes.append(numbers_of(measures, self._measuring.means, self._measuring.dtype))
        if self._measuring.keeps:
            self._kept.append((self._micro.number, totals_in(measures), kept_of(measures)))
        self._buffers.end_micro_batch(self._micro.number)
        self._mark("forward")
        try:
            if self._micro is self.batch.micro_batches[-1]:
                self._send_message()
            if len(self._measuring.terms) > 1:
                terms = [sum_of(measures[term.name]) for term in self._measuring.terms]
                self._backward_of_terms([self._state.scaler.scale(term) for term in terms])
            else:
                # The ranks' gradients are added.
                share = _constant(2.0**-self._exponent / self.batch.size, self._device, self._measuring.dtype)
                torch.autograd.backward(self._state.scaler.scale(sum_of(measures[LOSS])), share)
        except RankLost as error:
            self.lost = error
        self.lost = self.lost or self._sums_of_layers.lost
        if self._micro is not self.batch.micro_batches[-1]:
            self._world.end_pass()
        self._note_gradients()
        self._mark("backward")

    def _backward_of_terms(self, terms: Sequence[Tensor]) -> None:
        """Run a backward pass for each term of the loss; in the last micro-batch one for all, by their counts.

        Raises: RankLost; UsageError: if layers of other ranks would wait for a pass of this one meanwhile.
        """
        if self._micro is self.batch.micro_batches[-1]:
            factors = self._factors_of_terms()
            self._add_up_terms(factors)
            weighted = [term * factor for term, factor in zip(terms, factors, strict=True)]
            torch.autograd.backward(reduce(operator.add, weighted))
            return
        if self._sums_of_layers.is_used:
            raise UsageError(
                "--sync-batch-norm with a loss of several Means needs a single micro-batch on each rank: leave out "
                "--accumulation-steps, or give one Mean"
            )
        for number, term in enumerate(terms):
            if not term.requires_grad:
                continue
            is_last = number == len(terms) - 1
            gradients = torch.autograd.grad(term, self._trained_now, retain_graph=not is_last, allow_unused=True)
            mine = self._of_terms.setdefault(number, {})
            for parameter, gradient in zip(self._trained_now, gradients, strict=True):
                if gradient is not None:
                    mine[parameter] = mine[parameter] + gradient if parameter in mine else gradient

    def _factors_of_terms(self) -> list[Tensor]:
        """Return what each term of the loss is multiplied by, once all ranks have sent their counts. Raises RankLost.

        A term without any count in the step is left out.
        """
        summed = self._pending()
        factors = list[Tensor]()
        at = 0
        for term in self._measuring.terms:
            num_samples = _constant(float(self.batch.size), self._device, self._measuring.dtype)
            count = summed[at + 1] if term.kind == "count" else num_samples
            factors.append((1 / count).masked_fill(count <= 0, 0.0))
            at += term.size
        return factors

    def _add_up_terms(self, factors: Sequence[Tensor]) -> None:
        """Make one gradient of those of the terms in the micro-batches so far."""
        for number, of_term in self._of_terms.items():
            for parameter, gradient in of_term.items():
                weighted = gradient * factors[number]
                parameter.grad = weighted if parameter.grad is None else parameter.grad + weighted

    def _note_gradients(self) -> None:
        if self._watched_updates >= 0:
            gradients = [parameter.grad for parameter in self._parameters]
            self._gradients = [(gradient, gradient._version) for gradient in gradients if gradient is not None]

    def _check_gradients(self) -> None:
        """Raise UsageError in the first updates if other code has changed a gradient since the last pass."""
        if self._watched_updates >= 0:
            before = [(id(gradient), version) for gradient, version in self._gradients]
            self._note_gradients()
            if before != [(id(gradient), version) for gradient, version in self._gradients]:
                raise UsageError(
                    "gradients have changed between micro-batches: leave out loss.backward(), zero_grad() and clipping "
                    "(--clip-norm does it); micro.backward(loss) runs the backward pass"
                )

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside this block run a forward pass that counts for nothing, after `begin`, without other ranks."""
        with self._sums_of_layers.rehearsal(), self._autocast:
            yield
        self._buffers.put_back()

    @property
    def differing_buffers(self) -> set[str]:
        """The buffers that have got other values in one micro-batch than in another."""
        return self._buffers.differing

    def put_back(self) -> None:
        """Undo the changes of buffers by an update that does not end."""
        self._forward.close()
        self._buffers.put_back()
        self._release()

    def _release(self) -> None:
        for parameter in self._held_fixed:
            parameter.requires_grad_()
        self._held_fixed = []

    def _send_message(self) -> None:
        """Start the sum that travels with the gradients: measures, votes, fingerprint and changes of buffers."""
        nothing = (0.0,) * self._measuring.num_sums
        passes = self._sums_of_passes
        sums = reduce(operator.add, passes) if passes else _constant(nothing, self._device, self._measuring.dtype)
        votes = self._votes
        flags = votes.stop, votes.commit, votes.change, self._buffers.others_changed
        flags_sent = _constant(tuple(map(float, flags)), self._device)
        seconds = torch.tensor([votes.seconds]).to(self._device, non_blocking=True)
        fields = [sums, flags_sent, seconds, _constant(self._trained[self._name][1], self._device)]
        if self._ledger:
            samples = np.concatenate([np.zeros(0, np.int64), *[micro.samples for micro in self.batch.micro_batches]])
            fields.append(torch.tensor(in_bytes(fingerprint(samples))).to(self._device, non_blocking=True))
        # A tensor of its own: the sum over the ranks is written into it.
        message = torch.cat([*fields, *self._buffers.changes])
        self._num_fields = sum(map(len, fields))
        self._pending = cache(self._world.start_sum(message, "step"))

    def finish(
        self, meanwhile: Callable[[], None], before: Callable[[list[nn.Parameter]], object] | None = None
    ) -> tuple[Answer, Votes]:
        """Reduce, unscale, clip, step; return also what at least one rank has voted for. Raises RankLost.

        `meanwhile` is called while gradients are reduced, and `before` with the parameters that have a gradient, which
        is the mean over all samples then, before it is clipped.
        """
        if self.lost is not None:
            raise self.lost
        self._check_gradients()
        if not self.batch.micro_batches:
            self._send_message()
        self._sums_of_layers.end_step(self._device)
        meanwhile()

        state = self._state
        batch = self.batch
        measuring = self._measuring
        summed = self._pending()
        self._check_trained_alike(summed)
        gradients = self._world.reduce()
        if self._buffers.others and summed[measuring.num_sums + _BUFFERS_CHANGED] > 0:
            self._buffers.broadcast_others(self._world)
        kept = of_all_micro_batches(self._world.gather(self._kept)) if measuring.keeps else ({}, {})
        # No communication follows, so the step cannot break any more.
        self._mark("reduction")
        updated = [each for each in self._optimizers if any(p.grad is not None for p in optim.parameters_of(each))]
        for optimizer in updated:
            state.scaler.unscale_(optimizer)
        # The gradient of a single term is divided by the samples so far.
        by_count = len(measuring.terms) == 1 and measuring.means[0].kind == "count"
        factor = batch.size * 2.0**self._exponent / summed[1] if by_count else None
        norm = self._clip(gradients, factor, self._clip_norm if before is None else None)
        scale = state.scaler.scale(_constant(1.0, self._device))
        numbers = _on_its_way(torch.cat((summed[: self._num_fields], scale[None], norm[None])))
        broken = ~torch.isfinite(summed[: measuring.num_of_loss].sum() + norm)  # on all ranks: both are sums over them
        ahead = not self._buffers.others and before is None and all(map(optim.can_skip_on_device, self._optimizers))
        if ahead or not broken:
            self._buffers.finish(summed[self._num_fields :].masked_fill(broken, 0), batch.num_micro_batches)
            seed(self._device, order.key(self._seed, UPDATE, state.progress.step, self._turn))
            if before is not None:
                before([parameter for parameter in self._parameters if parameter.grad is not None])
                self._clip(own_gradients(self._parameters), None, self._clip_norm)
            for optimizer in self._optimizers:
                # The optimizer does nothing if this is 1, so a GPU has work while the host waits for the numbers.
                state.take_step(optimizer, broken.float() if ahead else None)
        else:
            self._buffers.put_back()
        if updated:
            state.scaler.update()
        *sums_and_flags, loss_scale, norm_before = numbers()
        totals = totals_of(measuring.means, sums_and_flags, batch.size)
        stop, commit, change, _, seconds, *rest = sums_and_flags[measuring.num_sums :]
        taken = rest[_TRAINED.stop - _TRAINED.start :]
        skipped = not math.isfinite(sum(sums_and_flags[: measuring.num_of_loss]) + norm_before)
        if by_count and sums_and_flags[1] > 0:
            state.exponents[self._name] = nearest_exponent(sums_and_flags[1] / batch.size)
        self._release()
        self._mark("optimizer")
        votes = Votes(stop > 0, commit > 0, change > 0, seconds)
        samples = from_bytes(taken) if taken else None
        scores = Scores(totals.means(), totals.count, *kept)
        loss_scale = loss_scale if state.scaler.is_enabled() else 0.0
        return Answer(scores, totals, skipped, norm_before, samples, loss_scale), votes

    def _check_trained_alike(self, summed: Tensor) -> None:
        """Raise UsageError on all ranks if they train different parameters: each digit is then 1 on some ranks only."""
        size = self._world.place.size
        if size == 1 or (self._device.type != "cpu" and not self._trains_others):  # to read it a GPU would wait
            return
        first = self._measuring.num_sums
        if any(0 < digit < size for digit in summed[first + _TRAINED.start : first + _TRAINED.stop].tolist()):
            raise UsageError(
                f"step {self._state.progress.step + 1}: ranks train different parameters; code that freezes, thaws or "
                "adds parameters must do the same on all ranks"
            )

    def _clip(self, gradients: Gradients, factor: Tensor | None, limit: float | None) -> Tensor:
        """Multiply the gradients by `factor` and clip them, if asked; return the 2-norm before the clip, [] float64."""
        # Horovod knows the squares from the second update on, and adds them up in another way, so a clip that used them
        # would round differently after a resume.
        if gradients.squares is not None and limit is None and not self._state.scaler.is_enabled():
            norm = torch.tensor(math.sqrt(gradients.squares), dtype=torch.float64)
        else:
            pieces = [piece for tensor in gradients.tensors for piece in _pieces(tensor)]
            norms = torch._foreach_norm(pieces) if pieces else [torch.zeros((), device=self._device)]
            norm = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
        if factor is not None:
            norm = norm * factor
        if limit is not None:  # as torch's clip_grad_norm_
            clip = (limit / (norm.to(self._measuring.dtype) + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else clip * factor
        if factor is not None and gradients.tensors:
            # The factor of a step that is skipped may be NaN, which would stay in the zeros between the gradients.
            torch._foreach_mul_(gradients.tensors, factor.nan_to_num(0.0))
        return norm


def key_of(names: Sequence[str]) -> str:
    """Return the name of an update by the optimizers of these names."""
    return "_".join(names)


def nearest_exponent(value: float) -> int:
    """Return the exponent of the power of two that is the nearest to a positive number."""
    return round(math.log2(value))


Kept = tuple[int, dict[str, Tensor], dict[str, Tensor]]
"""The number of a micro-batch with its totals and its values of each sample, by name."""


def of_all_micro_batches(of_ranks: Sequence[Sequence[Kept]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sum of the totals over all micro-batches, and the values of all samples, in their order."""
    kept = sorted((each for of_rank in of_ranks for each in of_rank), key=lambda each: each[0])
    totals = dict[str, Tensor]()
    values = dict[str, Tensor]()
    for name in kept[0][1]:
        totals[name] = reduce(operator.add, [of_micro[name] for _, of_micro, _ in kept])
    for name in kept[0][2]:
        values[name] = torch.cat([of_micro[name] for _, _, of_micro in kept])
    return totals, values


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    # On a CPU torch adds up squares in float32: over the 100 million elements of a layer of VGG-11 1% is lost.
    if gradient.numel() <= _PIECE or gradient.device.type != "cpu":
        return (gradient,)
    return torch.split(gradient, max(1, _PIECE * len(gradient) // gradient.numel()))


@cache
def _constant(value: float | tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)  # to make one takes longer than to use it


def of_use(error: Exception, batch: Batch) -> UsageError | None:
    """Return what to type if an error of torch in a pass comes from the settings, else None."""
    if isinstance(error, torch.OutOfMemoryError):
        images, passes = len(batch.micro_batches[0].samples), len(batch.micro_batches)
        peak = torch.cuda.max_memory_allocated() / 2**30
        less = f"type --batch-size {images // 2} --accumulation-steps {2 * passes}, which keeps the global batch"
        more = less if images > 1 else "type a smaller --image-size or --model"
        return UsageError(f"out of GPU memory in a micro-batch of {images} (peak {peak:.1f} GiB): {more}")
    if "more than 1 value per channel" in str(error):
        return UsageError("batch norm needs two samples in each micro-batch: type a larger --batch-size")
    if "does not require grad" in str(error):
        return UsageError("the loss depends on no trained parameter: leave out detach() and no_grad(), or freeze less")
    if "does not have a deterministic implementation" in str(error):
        operation = str(error).partition(" ")[0]
        return UsageError(f"--deterministic: {operation} has no deterministic version: leave the flag out")
    return None


def _on_its_way(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host. The returned function waits for them, not for work that is queued later."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    arriving, copied = numbers.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return arriving.tolist()

    return wait
