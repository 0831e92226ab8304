"""A rank that computes wrong gradients is named, though all ranks hold the same weights; nothing else changes."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as activation_checkpoint

from hvd_train import checkpoint, recheck
from hvd_train.errors import ReplicasDiffer
from tests.support import runs
from tests.support.elastic import Hosts, Kill
from tests.support.fault_plays import ONE, THREE, TWO, check, play, undisturbed
from tests.support.runs import small_config, trained
from tests.support.worlds import LocalWorld, ThreadWorld, run_ranks

Spoil = Callable[[Tensor], Tensor]
HOST = socket.gethostname()


def lowest_bit(gradient: Tensor) -> Tensor:
    """Return the gradient with the lowest bit of its first number flipped."""
    other = gradient.clone()
    other.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    return other


def wrong(
    world: ThreadWorld, rank: int, spoil: Spoil, *, after: int = 0, until: int = 10**9
) -> Callable[[int], nn.Module]:
    """Return what makes a model of which one gradient is spoiled on one rank, in some of its backward passes."""

    def make(num_classes: int) -> nn.Module:
        model, passes = runs.convnet(num_classes), 0

        def hook(gradient: Tensor) -> Tensor:
            nonlocal passes
            passes += 1
            return spoil(gradient) if world.place.rank == rank and after < passes <= until else gradient

        model.get_parameter("4.weight").register_hook(hook)
        return model

    return make


def records(kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("name") == kind]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits, too, ask for a recheck where one is named by its steps alone."""
    monkeypatch.setattr(recheck, "PAUSE_AT_COMMITS", 10**9)


def test_a_rank_whose_gradients_are_wrong_in_one_bit_is_named() -> None:
    """With its host and the parameter, at the next recheck; all go back to the commit that came after a good one."""
    config = small_config(epochs=2, commit_steps=4, recheck_steps=4)
    # Rank 1 has two of five slots in a step, and one more in each recheck: this is from step 6 to the recheck after 8.
    results = run_ranks(3, lambda world: trained(world, config, wrong(world, 1, lowest_bit, after=11, until=19)))
    undisturbed = run_ranks(3, lambda world: trained(world, config.replace(output_dir=Path("undisturbed"))))
    (change,) = records("world")
    named = f"after step 8 most ranks compute the same gradients of a slot, but not rank 1 on {HOST} in 4.weight"
    assert named in change["message"]
    assert change["steps_lost"] == 4
    for (_, weights), (_, expected) in zip(results, undisturbed, strict=True):
        assert runs.equal(weights, expected)


@pytest.mark.slow
def test_a_rank_that_is_always_wrong_ends_the_job() -> None:
    """The third time all ranks give up, with its host and what to look at; each commit is a right one."""
    config = small_config(epochs=2, commit_steps=4, recheck_steps=4)

    def body(world: ThreadWorld) -> None:
        with pytest.raises(ReplicasDiffer, match=f"but not rank 1 on {HOST} in 4.weight; it is the third time"):
            trained(world, config, wrong(world, 1, lowest_bit, after=11))

    run_ranks(3, body)
    assert [file.name for file in checkpoint.committed(Path("run"))] == ["step-0000000004.ckpt"]


def test_of_two_ranks_nobody_can_tell_which_is_right() -> None:
    """Both are named, with their hosts; before the first commit there is nothing to go back to."""
    config = small_config(epochs=1, recheck_steps=4)

    def body(world: ThreadWorld) -> None:
        with pytest.raises(
            ReplicasDiffer, match=f"no majority says .*rank 0 on {HOST} against rank 1 on {HOST} in 4.w"
        ):
            trained(world, config, wrong(world, 1, lowest_bit))

    run_ranks(2, body)
    assert checkpoint.committed(Path("run")) == []


def test_of_two_ranks_the_one_that_does_not_repeat_itself_is_wrong() -> None:
    """A core that fails now and then gives another result when the slot is computed once more."""
    config = small_config(epochs=1, commit_steps=3, recheck_steps=4)
    # Rank 1 has two slots in a step: this is the recheck after step 4.
    make = partial(wrong, rank=1, spoil=lambda gradient: 2 * gradient, after=8, until=9)
    run_ranks(2, lambda world: trained(world, config, make(world)))
    (change,) = records("world")
    assert (
        f"one of two ranks computes other gradients of a slot each time: rank 1 on {HOST} in 4.weight"
        in (change["message"])
    )


def rounded_differently(world: ThreadWorld) -> Callable[[int], nn.Module]:
    """Return what makes a model whose gradients differ by rounding, from rank to rank and from pass to pass."""
    passes = iter(range(10**9))
    return wrong(
        world, world.place.rank, lambda gradient: gradient * (1 + 1e-6 * (world.place.rank + next(passes) % 5))
    )


def test_processors_of_two_kinds_differ_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are compared to a bound: rounding is nobody's fault, and one that is wrong by a third is named."""
    monkeypatch.setattr(recheck, "what_decides_bits", lambda device, deterministic: None)
    config = small_config(epochs=1, commit_steps=3, recheck_steps=4)
    run_ranks(3, lambda world: trained(world, config, rounded_differently(world)))
    assert records("world") == []
    config = config.replace(output_dir=Path("run"), resume="never")
    run_ranks(3, lambda world: trained(world, config, wrong(world, 2, lambda g: g * 1.3, after=9, until=11)))
    (change,) = records("world")
    assert f"but not rank 2 on {HOST} in 4.weight" in change["message"]


def test_bits_that_no_rank_repeats_are_rounding() -> None:
    """It is said once, and from then on gradients are compared to a bound."""
    config = small_config(epochs=1, recheck_steps=2)
    run_ranks(3, lambda world: trained(world, config, rounded_differently(world)))
    assert records("world") == []
    (note,) = records("note")
    assert "the same slot gives other gradients each time, within rounding" in note["message"]


def test_a_network_with_random_numbers_of_its_own_is_nobodys_fault() -> None:
    """It is said once, and nothing is compared any more."""

    def make(world: ThreadWorld) -> Callable[[int], nn.Module]:
        own = random.Random(world.place.rank)
        return wrong(world, world.place.rank, lambda gradient: gradient * own.random())

    config = small_config(epochs=1, recheck_steps=2)
    run_ranks(3, lambda world: trained(world, config, make(world)))
    (note,) = records("note")
    assert "no more slots are computed again (--recheck-steps): the same slot gives other gradients" in note["message"]


class Checkpointed(nn.Module):
    """A network of which torch keeps no activations, in the older way, which refuses `torch.autograd.grad`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.net = nn.Conv2d(1, 1, kernel_size=1), runs.convnet(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return outputs [n, classes] for images [n, 1, 8, 8]."""
        if not torch.is_grad_enabled():
            return self.net(self.stem(images))  # type: ignore[no-any-return]
        outputs: Tensor = activation_checkpoint(self.net, self.stem(images), use_reentrant=True)
        return outputs


def test_a_network_whose_slot_cannot_be_computed_again_trains_all_the_same() -> None:
    """It is said once, with the reason."""
    run_ranks(2, lambda world: trained(world, small_config(epochs=1, recheck_steps=2), Checkpointed))
    (note,) = records("note")
    assert "no more slots are computed again (--recheck-steps): rank 0: " in note["message"]
    assert "checkpoint" in note["message"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (runs.batch_norm, {"ema_decay": 0.9, "freeze": "0.*", "unfreeze": ("1:*",)}),
        (runs.remembers, {"optimizer": "adamw", "learning_rate": 0.003}),
        pytest.param(runs.residual, {"channels_last": "on", "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(runs.convnet, {"compression": "fp16", "clip_norm": 1.0}, marks=pytest.mark.slow),
    ],
    ids=["frozen", "buffers", "bf16", "fp16 wire"],
)
def test_rechecks_leave_no_trace(make: Callable[[int], nn.Module], settings: dict[str, Any]) -> None:
    """The weights are those of a run without them, to the bit, and there is no false alarm."""
    config = small_config(epochs=2, recheck_steps=1, **settings)
    rechecked = run_ranks(3, lambda world: trained(world, config, make))
    assert records("world") == records("note") == []
    plain = config.replace(recheck_steps="none", output_dir=Path("plain"))
    for (_, weights), (_, expected) in zip(
        rechecked, run_ranks(3, lambda world: trained(world, plain, make)), strict=True
    ):
        assert runs.equal(weights, expected)


@pytest.mark.slow
def test_no_false_alarm_where_ranks_come_and_go() -> None:
    """Each world has rechecks of its own; the result is that of the undisturbed run."""
    job, folder = play([Kill(7, rank=0), Hosts(12, (ONE, TWO, THREE))], ONE, TWO, make=runs.smooth, recheck_steps=1)
    check(job, folder, undisturbed(runs.smooth))


def test_a_recheck_comes_by_time_and_before_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless steps are named it comes when the last one is long enough ago, and sooner before a commit."""
    found: dict[str, list[int]] = {"steps": []}
    compared = recheck.Rechecks._compared
    monkeypatch.setattr(
        recheck.Rechecks,
        "_compared",
        lambda self, step, *where: (found["steps"].append(step.number), compared(self, step, *where))[1],
    )
    monkeypatch.setattr(recheck, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(recheck, "PAUSE_AT_COMMITS", 0)
    run_ranks(2, lambda world: trained(world, small_config(epochs=1, commit_steps=4, recheck_steps="auto")))
    assert sorted(set(found["steps"])) == [4, 8, 10]  # commits, and the end of the epoch
    found["steps"].clear()
    monkeypatch.setattr(recheck, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(recheck, "PAUSE", 0)
    config = small_config(epochs=1, recheck_steps="auto", output_dir=Path("second"))
    run_ranks(2, lambda world: trained(world, config))
    assert sorted(set(found["steps"])) == [*range(1, 11)]


def test_one_rank_has_nobody_to_compare_with() -> None:
    """It is said where rechecks were asked for, and nowhere else."""
    trained(LocalWorld(), small_config(epochs=1, recheck_steps=2))
    assert [note["message"] for note in records("note")] == [
        "--recheck-steps: one rank has no other to compare its gradients with"
    ]
    config = small_config(epochs=1, recheck_steps="auto", resume="never")
    trained(LocalWorld(), config)
    assert not [note for note in records("note") if "recheck" in note["message"]]
