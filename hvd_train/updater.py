"""One optimizer step: passes over this rank's micro-batches, then reduce, unscale, clip, step."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hvd_train.tasks.task import LOSS, Measures, Measuring, Scores, numbers_of, sum_of, totals_of
from hvd_train.world.world import Gradients, World

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
        measuring: Mapping[str, Measuring],
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
        self._model, self._parameters = model, list[nn.Parameter]()
        self._trained: dict[str, tuple[list[int], tuple[float, ...]]] = {}  # by optimizer: ids, and a digest
        # By optimizer, after a step that was taken: the ids of parameters with a gradient, and how many have a state.
        self._steady: dict[str, tuple[list[int], int]] = {}
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

    def begin(self, state: TrainState, batch: Batch, votes: Votes, optimizer: str = "", turn: int = 0) -> None:
        """Begin the next update of `state` with this rank's part of its samples. Raises RankLost.

        `optimizer` has done `turn` updates in this step. Parameters of the others get no gradient meanwhile.
        """
        self._state, self.batch, self._votes = state, batch, votes
        self._name, self._optimizer, self._turn = optimizer, state.optimizers[optimizer], turn
        self._measuring = self._measurings[optimizer]
        self.lost = None
        self._sums_of_passes: list[Tensor] = []
        self._share = _constant(1 / batch.size, self._device)  # the ranks' gradients are added

        trained = [parameter for parameter in optim.parameters_of(self._optimizer) if parameter.requires_grad]
        self._note_trained(trained)
        for parameter in self._parameters:
            parameter.grad = None
        others = [other for other in state.optimizers.values() if other is not self._optimizer]
        fixed = [parameter for other in others for parameter in optim.parameters_of(other)]
        self._held_fixed = [parameter for parameter in fixed if parameter.requires_grad]
        for parameter in self._held_fixed:
            parameter.requires_grad_(False)
        self._world.begin_update(trained, len(batch.micro_batches))
        self._sums_of_layers.begin_step(len(batch.micro_batches), batch.num_micro_batches)
        self._buffers.begin()
        self._watched_updates -= 1
        self._note_gradients()

    def _note_trained(self, trained: Sequence[nn.Parameter]) -> None:
        """Check the trained parameters, and compute their digest, if they are others than in the update before."""
        ids = [*map(id, trained)]
        if self._name in self._trained and self._trained[self._name][0] == ids:
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
        self._sums_of_passes.append(numbers_of(measures, self._measuring.means, torch.float32))
        self._buffers.end_micro_batch(self._micro.number)
        self._mark("forward")
        try:
            if self._micro is self.batch.micro_batches[-1]:
                self._send_message()
            torch.autograd.backward(self._state.scaler.scale(sum_of(measures[LOSS])), self._share)
        except RankLost as error:
            self.lost = error
        self.lost = self.lost or self._sums_of_layers.lost
        if self._micro is not self.batch.micro_batches[-1]:
            self._world.end_pass()
        self._note_gradients()
        self._mark("backward")

    def _note_gradients(self) -> None:
        if self._watched_updates >= 0:
            gradients = [parameter.grad for parameter in optim.parameters_of(self._optimizer)]
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
        sums = reduce(operator.add, passes) if passes else _constant(nothing, self._device)
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
        self._pending = self._world.start_sum(message, "step")

    def finish(self, meanwhile: Callable[[], None]) -> tuple[Answer, Votes]:
        """Reduce, unscale, clip, step; return also what at least one rank has voted for. Raises RankLost.

        `meanwhile` is called while gradients are reduced.
        """
        if self.lost is not None:
            raise self.lost
        self._check_gradients()
        if not self.batch.micro_batches:
            self._send_message()
        self._sums_of_layers.end_step(self._device)
        meanwhile()

        optimizer, scaler, batch = self._optimizer, self._state.scaler, self.batch
        summed = self._pending()
        self._check_trained_alike(summed)
        gradients = self._world.reduce()
        if self._buffers.others and summed[self._measuring.num_sums + _BUFFERS_CHANGED] > 0:
            self._buffers.broadcast_others(self._world)
        # No communication follows, so the step cannot break any more.
        self._mark("reduction")
        scaler.unscale_(optimizer)
        by_count = self._measuring.means[0].kind == "count"  # gradients are divided by the samples so far
        norm = self._clip(gradients, scaler, batch.size / summed[1] if by_count else None)
        numbers = _on_its_way(torch.cat((summed[: self._num_fields], norm[None])))
        broken = ~torch.isfinite(summed[0] + norm)  # on all ranks: both are sums over them
        ahead = not self._buffers.others and self._is_gated()
        if ahead:  # the optimizer does nothing if this is 1, so a GPU has work while the host waits for the numbers
            optimizer.found_inf = broken.float()  # type: ignore[attr-defined]
        if ahead or not broken:
            self._buffers.finish(summed[self._num_fields :].masked_fill(broken, 0), batch.num_micro_batches)
            seed(self._device, order.key(self._seed, UPDATE, self._state.progress.step, self._turn))
            self._state.take_step(optimizer)
        else:
            self._buffers.put_back()
        if ahead:
            del optimizer.found_inf  # type: ignore[attr-defined]
        scaler.update()
        *sums_and_flags, norm_before = numbers()
        totals = totals_of(self._measuring.means, sums_and_flags, batch.size)
        stop, commit, change, _, seconds, *rest = sums_and_flags[self._measuring.num_sums :]
        taken = rest[_TRAINED.stop - _TRAINED.start :]
        skipped = not (math.isfinite(sums_and_flags[0]) and math.isfinite(norm_before))
        if not skipped:
            self._steady[self._name] = self._with_gradients(), len(optimizer.state)
        self._release()
        self._mark("optimizer")
        votes = Votes(stop > 0, commit > 0, change > 0, seconds)
        scores, samples = Scores(totals.means(), totals.count), from_bytes(taken) if taken else None
        return Answer(scores, totals, skipped, norm_before, samples), votes

    def _check_trained_alike(self, summed: Tensor) -> None:
        """Raise UsageError on all ranks if they train different parameters: each digit is then 1 on some ranks only."""
        if (size := self._world.place.size) == 1:
            return
        first = self._measuring.num_sums
        if any(0 < digit < size for digit in summed[first + _TRAINED.start : first + _TRAINED.stop].tolist()):
            raise UsageError(
                f"step {self._state.progress.step + 1}: ranks train different parameters; code that freezes, thaws or "
                "adds parameters must do the same on all ranks"
            )

    def _with_gradients(self) -> list[int]:
        return [id(parameter) for parameter in optim.parameters_of(self._optimizer) if parameter.grad is not None]

    def _is_gated(self) -> bool:
        """Return whether the optimizer can skip a step on the device.

        It needs a state of each parameter: fused optimizers of torch begin one with uninitialised memory, even if they
        skip the step.
        """
        if not all(group.get("fused") for group in self._optimizer.param_groups):
            return False
        return self._steady.get(self._name) == (self._with_gradients(), len(self._optimizer.state))

    def _clip(self, gradients: Gradients, scaler: torch.amp.GradScaler, factor: Tensor | None) -> Tensor:
        """Multiply the gradients by `factor`, if any, and clip them; return the 2-norm before the clip, [] float64."""
        if gradients.squares is not None and not scaler.is_enabled():
            norm = torch.tensor(math.sqrt(gradients.squares), dtype=torch.float64)
        else:
            pieces = [piece for tensor in gradients.tensors for piece in _pieces(tensor)]
            norms = torch._foreach_norm(pieces) if pieces else [torch.zeros((), device=self._device)]
            norm = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
        if factor is not None:
            norm = norm * factor
        if self._clip_norm is not None:  # as torch's clip_grad_norm_
            clip = (self._clip_norm / (norm.float() + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else clip * factor
        if factor is not None:
            # The factor of a step that is skipped may be NaN, which would stay in the zeros between the gradients.
            torch._foreach_mul_(gradients.tensors, factor.nan_to_num(0.0))
        return norm


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    # On a CPU torch adds up squares in float32: over the 100 million elements of a layer of VGG-11 1% is lost.
    if gradient.numel() <= _PIECE or gradient.device.type != "cpu":
        return (gradient,)
    return torch.split(gradient, max(1, _PIECE * len(gradient) // gradient.numel()))


@cache
def _constant(value: float | tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)  # to make one takes longer than to use it


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
