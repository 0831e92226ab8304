"""Whether all ranks compute the same gradients: each computes one slot of the step that was just taken once more.

A rank that computes wrongly (a core that is broken, a bit that flips on the way) spoils the sum of the gradients, and
so all ranks alike: no comparison of their states shows it.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hvd_train.data.trees import Tree, filled, leaves, structure
from hvd_train.job import Job
from hvd_train.launch import launcher
from hvd_train.network.buffers import unchanged
from hvd_train.network.device import gpu_name, seed
from hvd_train.network.digest import digest_of
from hvd_train.network.imprint import Gradients, digests_of, far_apart, numbers_of, tolerance
from hvd_train.network.normalization import is_synchronised
from hvd_train.parts import passes_of
from hvd_train.progress import order
from hvd_train.progress.clock import Timer
from hvd_train.run_files.machine import processor
from hvd_train.state import first_few
from hvd_train.step import SLOT, Step
from hvd_train.suspicions import Difference
from hvd_train.transfer import copies
from hvd_train.travel import may_travel

T = TypeVar("T")
_RECHECK = 4  # tells the choice of a slot from other uses of the seed
FIRST_PAUSE_S = 10.0
"""Before the first recheck that nothing else asks for."""
PAUSE, PAUSE_AT_COMMITS = 400, 300
"""The least time between two rechecks, in times of how long one takes: in general, and before a commit."""
_OF_CPUS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


@may_travel
@dataclass(frozen=True)
class Account:
    """What a rank tells of one computation of the slot."""

    digests: dict[str, str]
    """Of the gradients, by parameter."""
    numbers: Tensor
    """As `imprint.numbers_of` has them."""

    @staticmethod
    def of(gradients: Gradients) -> Account:
        """Return the account of these gradients."""
        return Account(digests_of(gradients), numbers_of(gradients))

    def apart(self, other: Account, share: float | None) -> list[str]:
        """Return the parameters whose gradients differ: in a bit, or with a `share` by more than rounding explains."""
        if share is None:
            return [name for name, digest in self.digests.items() if other.digests.get(name) != digest]
        far = far_apart(self.numbers, other.numbers, share).tolist()
        return [name for name, is_far in zip(self.digests, far, strict=True) if is_far]


class Rechecks:
    """The rechecks of a training in one world, on all ranks alike."""

    def __init__(self, job: Job) -> None:
        run, place = job.config.run, job.world.place
        self._job, self._every = job, run.rechecked_every
        # A rank that is still given the state has other weights; a synchronised layer sums over ranks in each pass.
        everybody_computes = job.share.ranks == place.size > 1
        alone = job.parts.updated_alone and not is_synchronised(job.state.model)
        self._is_on = everybody_computes and alone and run.recheck_steps != "none"
        if place.size == 1 and self._every is not None and not launcher.elastic(os.environ):
            job.output.journal.event("note", "--recheck-steps: one rank has no other to compare its gradients with")
        self._pause = Timer(FIRST_PAUSE_S if run.recheck_steps == "auto" else None)
        self._pause_at_commits = Timer(0.0)
        self._begun: list[float] = []  # the first steps
        self._knows_time = False
        self._share: float | None = None  # None: gradients are compared bit for bit
        self._met = False
        self._right_at: int | None = None
        self._draws_alike = True
        self._passes = passes_of(job.config, job.parts)

    def is_due(self, step: int, *, before_commit: bool) -> bool:
        """Return whether this rank wants a recheck after step number `step`, which may be followed by a commit."""
        if not self._is_on:
            return False
        if not self._knows_time:
            self._guess_time()
        by_steps = self._every is not None and step % self._every == 0
        return by_steps or self._pause.due or (before_commit and self._knows_time and self._pause_at_commits.due)

    def slot_of(self, step: int, num_slots: int) -> int | None:
        """Return the number of the slot of a step that a recheck after it computes; None where there is none.

        It follows from the seed and the step, so that all ranks have their turns in it.
        """
        return order.key(self._job.config.seed, _RECHECK, step) % num_slots if self._is_on else None

    def contradiction(self, step: Step, num_slots: int) -> Difference | None:
        """Return which rank computes other gradients than most, with its host and where; None where none does.

        Weights, buffers, gradients and random numbers are the same afterwards as before. Raises RankLost.
        """
        number = self.slot_of(step.number, num_slots)
        if number is None or step.result.skipped:
            return None
        begun = time.perf_counter()
        with self._job.clocks.stopwatch.paused():
            found = self._compared(step, number, self._job.balance.owner(number, num_slots))
        self._rest_after(time.perf_counter() - begun)
        if found is None:
            self._right_at = step.number if self._is_on else self._right_at
            return None
        return replace(found, message=f"after step {step.number} {found.message}", right_at=self._right_at)

    def _guess_time(self) -> None:
        """Before the first recheck, take it for as long as a step: a short run is not to pay more, either.

        In the first step there is much that comes once, such as the choice of algorithms on a GPU.
        """
        self._begun.append(time.perf_counter())
        if len(self._begun) == 3:
            self._rest_after(self._begun[2] - self._begun[1])

    def _rest_after(self, seconds: float) -> None:
        """Have no recheck, but for those by steps, until one that takes so long is a small share of the time."""
        self._knows_time = True
        self._pause.reset(at_least=PAUSE * seconds)
        self._pause_at_commits.reset(at_least=PAUSE_AT_COMMITS * seconds)

    def _compared(self, step: Step, number: int, root: int) -> Difference | None:
        world = self._job.world
        if not self._met:
            self._meet()
        slot = self._shared(step, root)
        if slot is None:
            return self._ended("samples have a structure of their own, which cannot be sent")
        random_numbers = order.key(self._job.config.seed, SLOT, step.number - 1, number)
        first, trouble = self._tried(lambda: self._told(self._gradients(slot, random_numbers)))
        of_ranks = world.gather((None if first is None else first[1], trouble))
        if troubles := [trouble for _, trouble in of_ranks if trouble is not None]:
            return self._ended(troubles[0])
        if self._is_agreed([told for told, _ in of_ranks]):
            return None
        # Once more on each rank: one that does not repeat itself is the wrong one, unless no rank does.
        assert first is not None
        before, _ = first
        both, trouble = self._tried(
            lambda: (Account.of(before), Account.of(self._gradients(slot, random_numbers)), socket.gethostname())
        )
        accounts = world.gather((both, trouble))
        if troubles := [trouble for _, trouble in accounts if trouble is not None]:
            return self._ended(troubles[0])
        found = [both for both, _ in accounts if both is not None]
        return self._judged([(one, two) for one, two, _ in found], [host for *_, host in found])

    def _told(self, gradients: Gradients) -> tuple[Gradients, str | Tensor]:
        """Return the gradients, and what the other ranks are told of them first."""
        return gradients, digest_of("", _named(gradients)) if self._share is None else numbers_of(gradients)

    def _judged(self, accounts: Sequence[tuple[Account, Account]], hosts: Sequence[str]) -> Difference | None:
        """Return who is wrong, by two accounts of each rank; None where the computation, and no rank, is to blame."""
        share = self._share
        if share is None and any(first.apart(second, None) for first, second in accounts):
            # Bits that do not come again may be rounding (sums in the order in which threads come), or a fault.
            share = self._share = self._tolerance()
            if not any(account.apart(accounts[0][0], share) for both in accounts for account in both):
                self._job.output.journal.event(
                    "note", "the same slot gives other gradients each time, within rounding: they are compared so"
                )
                return None
        unsteady = {
            rank: names for rank, (one, two) in enumerate(accounts) if (names := first_few(two.apart(one, share)))
        }
        steady = [rank for rank in range(len(accounts)) if rank not in unsteady]
        if 2 * len(unsteady) > len(accounts):
            return self._ended(
                "the same slot gives other gradients each time: its passes have random numbers of their own"
            )
        right = next(
            (rank for rank in steady if 2 * len(self._alike(accounts, steady, rank, share)) > len(steady)), None
        )
        reference = steady[0] if right is None else right
        wrong = {
            rank: names
            for rank in steady
            if (names := first_few(accounts[rank][0].apart(accounts[reference][0], share)))
        } | unsteady
        if not wrong:
            return None
        named = [f"rank {rank} on {hosts[rank]} in {wrong[rank]}" for rank in sorted(wrong)[:3]]
        more = f" and {len(wrong) - len(named)} more ranks" if len(wrong) > len(named) else ""
        found = "; ".join(named) + more
        if right is None:
            found = f"rank {reference} on {hosts[reference]} against {found}"
            told = "ranks compute different gradients of a slot, and no majority says which is right"
            return Difference(f"{told}: {found}")
        if len(accounts) == 2:
            return Difference(f"one of two ranks computes other gradients of a slot each time: {found}", tuple(wrong))
        return Difference(f"most ranks compute the same gradients of a slot, but not {found}", tuple(sorted(wrong)))

    @staticmethod
    def _alike(
        accounts: Sequence[tuple[Account, Account]], ranks: Sequence[int], one: int, share: float | None
    ) -> list[int]:
        """Return those of the `ranks` whose gradients are those of rank `one`."""
        return [rank for rank in ranks if not accounts[rank][0].apart(accounts[one][0], share)]

    def _is_agreed(self, told: Sequence[str | Tensor | None]) -> bool:
        first = told[0]
        if not isinstance(first, Tensor) or self._share is None:
            return len(set(told)) == 1
        return not any(far_apart(other, first, self._share).any() for other in told if isinstance(other, Tensor))

    def _meet(self) -> None:
        """Find out whether these ranks compute the same bits, and draw the same random numbers."""
        device, deterministic = self._job.parts.device, self._job.config.precision.deterministic
        of_ranks = self._job.world.gather((what_decides_bits(device, deterministic=deterministic), gpu_name(device)))
        kinds = {kind for kind, _ in of_ranks}
        self._share = None if len(kinds) == 1 and None not in kinds else self._tolerance()
        self._draws_alike = len({gpu for _, gpu in of_ranks}) == 1
        self._met = True

    def _tolerance(self) -> float:
        return tolerance(self._job.state.model, self._job.config.precision.precision, self._job.parts.device)

    def _shared(self, step: Step, root: int) -> tuple[Tree, Tree] | None:
        """Return on every rank the inputs and the targets of the slot of rank `root`; None where that cannot be."""
        world, example = self._job.world, self._job.parts.example
        tensors = None
        if step.kept is not None and structure((step.kept.inputs, step.kept.targets)) == structure(example):
            tensors = leaves((step.kept.inputs, step.kept.targets))
        received = copies(tensors, world, root, self._job.parts.device)
        if received is None:
            return None
        inputs, targets = filled(example, iter(received))
        return inputs, targets

    def _tried(self, compute: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return what is computed of the slot, or why it cannot be (reentrant checkpoints, too little memory)."""
        try:
            return compute(), None
        except Exception as error:  # noqa: BLE001  # a network may raise anything; the steps say so, if it is so there
            why = next(iter(str(error).splitlines()), type(error).__name__)
            return None, f"rank {self._job.world.place.rank}: {why}"

    def _gradients(self, slot: tuple[Tree, Tree], random_numbers: int) -> Gradients:
        job = self._job
        device, model, scaler = job.parts.device, job.state.model, job.state.scaler
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        inputs, targets = filled(slot, (tensor.clone() for tensor in leaves(slot)))
        count = len(leaves(inputs)[0])
        with unchanged(model), _same_random_numbers(device, random_numbers):
            before = None if self._draws_alike else torch.cuda.get_rng_state(device)
            _, losses = self._passes.forward(inputs, targets, count)
            share = torch.full_like(losses, 1 / count)
            found = torch.autograd.grad(scaler.scale(losses), list(trained.values()), share, allow_unused=True)
            if before is not None and not torch.equal(before, torch.cuda.get_rng_state(device)):
                raise RuntimeError("GPUs of different kinds draw different random numbers")
        return dict(zip(trained, found, strict=True))

    def _ended(self, why: str) -> Difference | None:
        """Say why there are no more rechecks in this world; nobody is to blame."""
        self._is_on = False
        self._job.output.journal.event("note", f"no more slots are computed again (--recheck-steps): {why}")
        return None


def what_decides_bits(device: torch.device, *, deterministic: bool) -> str | None:
    """Return what ranks must have in common to compute the same bits; None where nothing makes sure that they do.

    CPUs have the same name, instructions and number of threads; a GPU repeats its bits with `deterministic` alone.
    """
    if device.type == "cuda":
        return f"{gpu_name(device)}, CUDA {torch.version.cuda}, torch {torch.__version__}" if deterministic else None
    limits = [f"{name}={os.environ[name]}" for name in _OF_CPUS if name in os.environ]
    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return ", ".join([processor(), instructions, f"{threads} threads", f"torch {torch.__version__}", *limits])


def _named(gradients: Gradients) -> Iterator[tuple[str, Tensor]]:
    return ((name, gradient) for name, gradient in gradients.items() if gradient is not None)


@contextmanager
def _same_random_numbers(device: torch.device, number: int) -> Iterator[None]:
    """Seed torch, Python and numpy with `number` in this block, and have their states as before afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed(device, number)
            random.seed(number)
            np.random.seed(number % 2**32)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
