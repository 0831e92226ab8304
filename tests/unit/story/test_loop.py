"""The loop when something is wrong: losses that are not finite, samples that cannot be read."""

from __future__ import annotations

import itertools
import json
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvd_train import checkpoint, loop
from hvd_train.data import loader
from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.batches import Batch
from hvd_train.errors import Diverged, UsageError
from hvd_train.loop import wishes
from hvd_train.output import Output
from hvd_train.progress.clock import Timer
from hvd_train.progress.order import Assignment, Cut, Order, assignments, order_of
from hvd_train.run_files.ledger import audit
from hvd_train.step import Votes
from hvd_train.world.world import LocalWorld, Request
from tests.support import runs
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import own_generator, run_ranks


def records(kind: str, run: str = "run") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a kind."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


class Poisoned(nn.Module):
    """A network whose loss is not finite in some steps, counted from 1, for the samples in one pixel's light."""

    def __init__(self, bad: Callable[[int], bool], what: str) -> None:
        super().__init__()
        self.body, self.calls, self.bad, self.what = runs.batch_norm(10), 0, bad, what

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        if not self.training:
            return logits
        self.calls += 1
        if not self.bad((self.calls - 1) // 5 + 1):  # 20 images in 5 slots of 4; the last step of an epoch has 3
            return logits
        return logits * math.nan if self.what == "loss" else _Explodes.apply(logits)  # type: ignore[no-any-return,no-untyped-call]


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(what: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, statistics, optimizer and moving average are those of the step before; it is counted."""
    monkeypatch.setattr(checkpoint.DiskStore, "commit", lambda store, state: store.commit_last(state).result())
    config = small_config(epochs=1, ema_decay=0.9, optimizer=optimizer, commit_steps=1, keep_checkpoints=100)
    trained(LocalWorld(), config, lambda _: Poisoned(lambda step: step == 4, what))
    states = {}
    for path in checkpoint.committed(Path("run")):
        snapshot = checkpoint.read(path)
        states[snapshot["progress"]["step"]] = snapshot
    for part in ("model", "average"):
        assert equal(states[3][part], states[4][part])
        assert not equal(states[4][part], states[5][part])
    for number, of_parameter in states[3]["optimizer"]["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(states[4]["optimizer"]["state"][number][name]))
            for name, value in of_parameter.items()
        )
    steps = records("step")
    assert [record["skipped_steps"] for record in steps] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    told = [record["message"] for record in records("event") if record["name"] == "skipped"]
    assert told == (["step 4 is skipped: its loss is not finite"] if what == "loss" else [])
    assert math.isfinite(records("epoch")[0]["loss"]), "one step has spoiled the mean of the epoch"


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_many_in_a_row_end_the_run(ranks: int) -> None:
    """The error names step, ranks and samples, once; the last good state is committed, and weights are finite."""
    config = small_config(epochs=1, max_skipped_steps=3, ledger=True, batch_size=10)
    bad = 6  # from this sample on, as the data set counts

    class OfSamples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = runs.convnet(10)
            self.step = 0

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.body(images)
            if not self.training:
                return logits
            self.step += 1
            # Two slots a step: one rank takes both, or two ranks one each.
            now = (self.step - 1) // (2 if ranks == 1 else 1) + 1
            poison = torch.zeros(len(logits), 1)
            if now >= bad:
                poison[0] = math.inf
            return logits + poison * logits.sign()

    with pytest.raises(Diverged) as told:
        run_ranks(ranks, lambda world: trained(world, config, lambda _: own_generator(OfSamples())))
    lines = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    samples = order_of(config.seed, 0, 190, 1)[slice(*lines[7]["positions"])]
    message = str(told.value)
    assert "3 steps in a row were skipped; in the last one, step 8, the loss is not finite" in message
    if ranks == 1:
        assert f"(rank 0: samples {samples[0]}, {samples[10]})" in message
    else:
        assert f"(rank 0: samples {samples[0]}; rank 1: samples {samples[10]})" in message
    newest = checkpoint.newest_good(Path("run"), pytest.fail)
    assert newest is not None
    assert newest["progress"]["step"] == 8
    assert all(bool(value.isfinite().all()) for value in newest["model"].values())


class Unreadable(runs.Jittered):
    """Its last samples cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= 185:
            raise UsageError(f"cannot read sample {index}")
        return super().__getitem__(index)


def test_steps_before_a_sample_that_cannot_be_read_are_done() -> None:
    """The batch that has it is read while the step before it is under way, which is taken all the same."""
    config = small_config(epochs=1, ledger=True, log_steps=1)
    bad = np.flatnonzero(order_of(config.seed, 0, 190, 1)[0:190] >= 185)
    whole = int(bad[0]) // 20
    assert whole > 1
    data = Unreadable(190, jitter=False), runs.Jittered(20, jitter=False)
    with pytest.raises(UsageError, match="cannot read sample 1"):
        trained(LocalWorld(), config, data=lambda _: data)
    entries = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    assert [entry["steps"] for entry in entries] == [[step, step] for step in range(1, whole + 1)]
    assert [record["step"] for record in records("step")] == list(range(1, whole + 1))


class Deviates(ArrayLoader):
    """A loader that delivers a sample in place of another, once in the second epoch."""

    @override
    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        for number, batch in enumerate(super().load(epoch, work)):
            own = tuple(batch.micro_batches)
            for micro in own:
                if (epoch, number) == (1, 3) and micro.number == 1:
                    micro.samples[2] = (micro.samples[2] + 1) % 190
            yield replace(batch, micro_batches=own)


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_loader_that_delivers_another_sample_is_found(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has what came, not what was asked for, in an epoch under way as in one that is done."""
    monkeypatch.setattr(loader, "ArrayLoader", Deviates)
    config = small_config(epochs=epochs, ledger=True)
    run_ranks(2, lambda world: trained(world, config))
    assert audit(Path("run")).faults == ("step 14: not the samples that stand at positions 60 to 79 of epoch 1",)


def test_ranks_that_take_the_same_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that count twice, and others that do not at all, whatever the number of samples says."""

    def same_for_all(order: Order, cursor: int, cut: Cut, rank: int, size: int, *_: object) -> Iterator[Assignment]:
        for number, assignment in enumerate(assignments(order, cursor, cut, 0, size)):
            mine = next(itertools.islice(assignments(order, cursor, cut, rank, size), number, None))
            yield assignment if number == 5 else mine

    monkeypatch.setattr(loop, "assignments", same_for_all)
    config = small_config(epochs=1, ledger=True, batch_size=5)
    run_ranks(2, lambda world: trained(world, config))
    assert audit(Path("run")).faults == ("step 6: not the samples that stand at positions 100 to 119 of epoch 0",)


def test_the_same_command_again_gives_up_at_once() -> None:
    """A run that has given up does not train on as if nothing had been: one more such step, and it ends again."""
    config = small_config(epochs=1, max_skipped_steps=3)
    for steps in (3, 4):
        with pytest.raises(Diverged):
            trained(LocalWorld(), config, lambda _: Poisoned(lambda step: True, "loss"))
        newest = checkpoint.newest_good(Path("run"), pytest.fail)
        assert newest is not None
        assert newest["progress"]["step"] == steps


def test_a_skip_now_and_then_does_not_add_up() -> None:
    """Only steps in a row count towards giving up."""
    config = small_config(epochs=1, max_skipped_steps=2)
    result, _ = trained(LocalWorld(), config, lambda _: Poisoned(lambda step: step % 2 == 0, "loss"))
    assert result.finished


class Answering(LocalWorld):
    """A world whose job answers a signal in this way."""

    def __init__(self, answer: Request) -> None:
        super().__init__()
        self.answer = answer

    def requested(self, *, told_to_end: bool = False) -> Request:
        """As every job does while there was no signal."""
        return self.answer if told_to_end else "train"


@pytest.mark.parametrize(
    ("answer", "votes"),
    [
        ("stop", Votes(stop=True, commit=False, change=False)),
        ("change", Votes(stop=False, commit=True, change=True)),
        ("train", Votes(stop=False, commit=False, change=False)),
    ],
)
def test_the_job_says_what_comes_of_a_signal(answer: Request, votes: Votes) -> None:
    """All stop, or this rank leaves after a step that is committed: its host may be gone soon after."""
    job: Any = SimpleNamespace(
        config=small_config(commit_steps=100),
        state=SimpleNamespace(progress=SimpleNamespace(step=7)),
        clocks=SimpleNamespace(**dict.fromkeys(("time_limit", "commit_timer", "check_timer"), Timer(None))),
        output=Output(small_config()),
        stop=SimpleNamespace(received=None),
        world=Answering(answer),
        handover=SimpleNamespace(is_done=False),
    )
    assert wishes(job) == Votes(stop=False, commit=False, change=False)
    job.handover.is_done = True  # newcomers have the state: they are to compute, too
    assert wishes(job) == Votes(stop=False, commit=False, change=True)
    job.handover.is_done = False
    job.stop.received = signal.SIGTERM
    assert wishes(job) == votes
