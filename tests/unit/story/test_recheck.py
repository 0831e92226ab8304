"""Ranks compute micro-batches of one another again, so that a wrong machine is found."""

import functools
import itertools
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from hvd_train.recheck import NOT_COMPARED, Pass, Passes, differences, rounding, wrong_rank
from hvd_train.run_files.ledger import audit
from hvd_train.tasks.task import Mean, Task
from hvd_train.world import known_answer
from hvd_train.world.world import Gradients, PendingSum
from tests.support import runs
from tests.support.elastic import (
    NUMBERS,
    ONE,
    STEPS,
    THREE,
    TOLERANCE,
    TWO,
    ElasticThreadWorld,
    Job,
    Kill,
    run_elastic,
    undisturbed,
)
from tests.support.launching import notes, records
from tests.support.runs import Weights, largest_difference, small_config, trained
from tests.support.worlds import run_ranks

PLAIN = functools.cache(undisturbed)


def play(
    wrong: Any,
    *hosts: tuple[str, int],
    factor: float = 1.5,
    kind: type[ElasticThreadWorld] = ElasticThreadWorld,
    network: Any = runs.convnet,
    **settings: Any,
) -> tuple[Job, Path]:
    """Train 20 steps, with a comparison in each fifth; `wrong(world, call)` says whether the
    gradient of this call of a hook, counted in each worker, is wrong, by this factor.
    """
    folder = Path(f"run-{next(NUMBERS)}")
    settings = {"recheck_steps": 5, "commit_steps": 2, **settings}
    config = small_config(epochs=2, ledger=True, output_dir=folder, **settings)

    def body(world):
        calls = itertools.count()

        def spoil(gradient):
            return gradient * factor if wrong(world, next(calls)) else gradient

        def make(num_classes):
            model = network(num_classes)
            model.get_parameter("0.weight").register_hook(spoil)
            return model

        return trained(world, config, make)

    return run_elastic(body, dict(hosts), first=len(hosts), kind=kind), folder


def host_of(world: ElasticThreadWorld) -> str:
    return world._job.roster.worker(world._number).host


def hosts_at_the_end(job: Job) -> set[str]:
    return {worker.host for worker in job.roster.world}


def events(folder: Path) -> list[str]:
    return [event["message"] for event in records("event", folder) if event["name"] == "recheck"]


def check(job: Job, folder: Path, expected: Weights | None = None) -> None:
    assert job.finish.exit_code == 0
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS)
    plain = expected or PLAIN()
    assert all(largest_difference(weights, plain) <= TOLERANCE for _, weights in job.results)


@pytest.mark.parametrize("turn", [0, 1], ids=["in the pass for another rank", "in its own"])
def test_a_step_with_a_wrong_gradient_is_taken_again(turn: int) -> None:
    seen = set()

    def wrong(world, call):
        if world.place.rank != 1 or world._step != 5 or len(seen) > turn:
            return False
        seen.add(call)
        return len(seen) > turn

    job, folder = play(wrong, ONE, TWO)
    check(job, folder)
    [event] = events(folder)
    assert re.match(r"rank [01] on \w+ and rank [01] on \w+ computed micro-batch", event)
    assert re.search(r"of step 5 \(by \S+ of the gradient's norm, in 0.weight\) differently", event)
    assert job.sizes == [2]


def test_a_rank_that_computes_wrongly_leaves_and_its_steps_are_taken_again() -> None:
    """It begins in the eighth step; the comparison of the tenth finds it."""
    job, folder = play(
        lambda world, _: host_of(world) == "h2" and world._step >= 8, ONE, TWO, THREE
    )
    check(job, folder)
    assert hosts_at_the_end(job) == {"h1", "h3"}
    distrusted = [path.name for path in folder.glob("checkpoints/*.distrusted")]
    assert min(distrusted) > "step-0000000005"
    assert any(event.startswith("rank 1 on") and "twice" in event for event in events(folder))


def test_ranks_compare_in_the_first_steps_of_a_world() -> None:
    job, folder = play(
        lambda world, _: host_of(world) == "h2" and world._step >= 5,
        ONE,
        TWO,
        THREE,
        recheck_steps=None,
    )
    check(job, folder)
    assert hosts_at_the_end(job) == {"h1", "h3"}
    assert any("of step 10" in event for event in events(folder))


def test_two_ranks_resume_once_if_one_computes_wrongly() -> None:
    """Neither knows which of them it is; the second time the job ends."""
    job, _ = play(lambda world, _: world.place.rank == 1 and world._step >= 8, ONE, TWO)
    assert job.finish.exit_code == 4


def test_of_two_ranks_the_one_with_a_wrong_answer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time they compute what has a known answer."""
    threads = set()

    def wrong(world, _):
        if host_of(world) != "h2" or world._step < 8:
            return False
        threads.add(threading.current_thread())
        return True

    monkeypatch.setattr(
        known_answer, "is_right", lambda _: threading.current_thread() not in threads
    )
    job, folder = play(wrong, ONE, TWO)
    check(job, folder)
    assert hosts_at_the_end(job) == {"h1"}


@pytest.mark.parametrize("factor", [1.5, 1 + 1e-6], ids=["a fault", "rounding"])
def test_newcomers_decide_as_survivors_about_a_difference(factor: float) -> None:
    """Rank 2 dies in the second attempt at the step; another worker takes its place."""
    calls = Counter()

    def wrong(world, _):
        rank = world.place.rank
        if world._step < 5 or len(world._job.sizes) > 2:
            return False
        calls[rank] += 1
        if rank == 2 and calls[rank] == 3:  # it has two passes in an attempt
            world._job.events.append(Kill(5, rank=2))
        return rank == 1 and calls[rank] <= 9  # it has three

    job, folder = play(wrong, ONE, TWO, THREE, factor=factor)
    check(job, folder)
    assert len(job.sizes) > 1
    assert any("twice" in event for event in events(folder)) == (factor == 1.5)


class Counts(nn.Identity):
    """A layer whose forward pass changes an attribute."""

    passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        return images


def two_means(model: nn.Module, batch: Any) -> dict[str, Any]:
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return {"loss": Mean(losses.sum(), losses.numel()) + Mean(losses[:1].sum(), 1)}


@pytest.mark.parametrize(
    ("why", "layer", "settings", "task"),
    [
        ("passes change attributes", Counts, {}, None),
        ("the loss has several Means", nn.Identity, {}, Task(two_means)),
        ("--sync-batch-norm", nn.Identity, {"sync_batch_norm": True, "batch_size": 10}, None),
        ("", nn.Identity, {"recheck_steps": 0}, Task(two_means)),
        ("", nn.Identity, {}, None),
    ],
)
def test_what_ranks_cannot_compare_is_said(
    why: str, layer: type[nn.Module], settings: dict[str, Any], task: Task | None
) -> None:
    config = small_config(epochs=1, **settings)
    run_ranks(
        2,
        lambda world: trained(
            world, config, lambda num: nn.Sequential(layer(), runs.batch_norm(num)), task=task
        ),
    )
    said = [note for note in notes() if note.startswith(NOT_COMPARED.partition("{")[0])]
    assert [why in note for note in said] == ([True] if why else [])


class Faulty(ElasticThreadWorld):
    """A world in which bits flip once on one rank, after the sum of a step."""

    fault = "", 0, 0, 0  # what, the seed of the bits, the rank and the step

    def is_faulty(self, step: int) -> bool:
        """Return whether bits flip here in this step."""
        return len(self._job.sizes) == 1 and (self.place.rank, step) == self.fault[2:]

    @override
    def wrap(self, model: nn.Module, compression: str = "none") -> None:
        super().wrap(model, compression)
        self.statistics = [each for each in model.buffers() if each.is_floating_point()]

    @override
    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        pending = super().start_sum(tensor, name)
        is_message = name.startswith("step") and self.fault[0] == "received statistics"
        if not is_message or not self.is_faulty(self._steps + 1):
            return pending

        def wait():
            message = pending()
            _flip(message[-16:], np.random.default_rng(self.fault[1]))
            return message

        return wait

    @override
    def reduce(self) -> Gradients:
        gradients = super().reduce()
        what, seed, *_ = self.fault
        if not self.is_faulty(self._steps):
            return gradients
        random = np.random.default_rng(seed)
        parameter = self._parameters[random.integers(len(self._parameters))]
        if what == "received gradient":
            _flip(parameter.grad, random)
        elif what == "weight":
            _flip(parameter.data, random)
        elif what == "running statistic":
            FLIPS[threading.get_ident()] = self.statistics, random
        elif what == "momentum":
            FLIPS[threading.get_ident()] = [], random
        return gradients


FLIPS: dict[int, tuple[list[Tensor], np.random.Generator]] = {}
"""What flips after the step of this thread's optimizer: one of these tensors, or its momentum."""


def _flip(tensor: Tensor, random: np.random.Generator) -> None:
    """Flip three bits."""
    bits = tensor.detach().view(torch.int32).view(-1)
    for _ in range(3):
        bits[random.integers(len(bits))] ^= 1 << int(random.integers(31))


def flip_after_step(optimizer: Optimizer, *_: object) -> None:
    if (found := FLIPS.pop(threading.get_ident(), None)) is None:
        return
    tensors, random = found
    tensors = tensors or [state["momentum_buffer"] for state in optimizer.state.values()]
    _flip(tensors[random.integers(len(tensors))], random)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "seed"), [*((3, seed) for seed in range(13)), *((2, seed) for seed in range(5))]
)
@pytest.mark.parametrize(
    "what",
    [
        "weight",
        "momentum",
        "running statistic",
        "received gradient",
        "received statistics",
        "later gradients",
    ],
)
def test_a_fault_at_any_place_changes_no_result(
    what: str, ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks notice it when they commit or compare, and resume from a commit before it.

    Gradients that are wrong by less than rounding may be are an event, and change no result.
    """
    random = np.random.default_rng([seed, ranks])
    rank = int(random.integers(ranks))
    step = int(random.integers(1, STEPS))
    monkeypatch.setattr(Faulty, "fault", (what, seed, rank, step))
    hook = register_optimizer_step_post_hook(flip_after_step)
    factor = float(random.choice([0.5, 0.99, 1.001, -1.0, 1e20]))

    def wrong(world, _):
        lasts = what == "later gradients" and len(world._job.sizes) == 1
        return lasts and world.place.rank == rank and world._step >= step

    hosts = (ONE, TWO, THREE)[:ranks]
    network = runs.batch_norm
    job, folder = play(wrong, *hosts, factor=factor, kind=Faulty, network=network, momentum=0.9)
    hook.remove()
    check(job, folder, undisturbed(network, momentum=0.9))
    is_slight = what == "later gradients" and factor == 1.001
    assert len(job.sizes) > 1 or (is_slight and events(folder))


def of(number: int, *norms: float) -> Pass:
    return Pass(number, norms, norms)


NEARLY = of(0, 1.0, 2.0 + 1e-6)


@pytest.mark.parametrize(
    ("machines", "is_again", "other", "differs"),
    [
        (("cpu", "cpu"), False, NEARLY, True),
        (("cpu", "cpu"), True, NEARLY, False),
        (("cpu", "another"), False, NEARLY, False),
        (("", ""), False, NEARLY, False),
        (("", ""), False, of(0, 1.0, 2.1), True),
        (("", ""), False, of(0, 1.0, torch.inf), True),
        (("cpu", "cpu"), False, of(7, 9.0, 9.0), False),  # no rank has it
    ],
)
def test_passes_are_compared_to_the_bit_or_up_to_rounding(
    machines: tuple[str, str], is_again: bool, other: Pass, differs: bool
) -> None:
    first, second = machines
    of_ranks = [
        Passes(first, is_again, True, of(0, 1.0, 2.0), None),
        Passes(second, False, True, None, other),
    ]
    assert len(differences(of_ranks, rounding("fp32"))) == differs


def test_gradients_that_overflow_are_no_difference() -> None:
    of_ranks = [
        Passes("", False, True, of(0, torch.inf), None),
        Passes("", False, True, None, of(0, torch.nan)),
    ]
    assert differences(of_ranks, 0.1) == []


def test_the_wrong_rank_is_in_all_differences() -> None:
    right, wrong = of(0, 1.0), of(0, 2.0)
    passes = [
        Passes("", False, True, right, of(1, 1.0)),
        Passes("", False, True, of(1, 2.0), of(2, 2.0)),  # it is wrong
        Passes("", False, True, of(2, 1.0), right),
    ]
    assert wrong_rank(differences(passes, 0.1), passes) == 1
    two = [Passes("", False, True, right, of(1, 1.0)), Passes("", False, True, of(1, 2.0), wrong)]
    assert wrong_rank(differences(two, 0.1), two) is None
