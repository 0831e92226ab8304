"""The answers of steps in the ledger, steps that are trained again, and runs that are compared."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from typing_extensions import override

from hvd_train.comparison import difference
from hvd_train.config import DataConfig
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.folder import ImageFiles
from hvd_train.data.sources import file_of
from hvd_train.errors import UsageError
from hvd_train.parts import Own
from hvd_train.replay import ReplayedStep, replay
from hvd_train.run import train
from hvd_train.run_files.ledger import answers_in
from hvd_train.world.world import Gradients, LocalWorld, World
from tests.support.elastic import ONE, THREE, TWO, Kill, run_elastic
from tests.support.runs import RUN, batch_norm, convnet, dropout, few_digits, small_config, trained
from tests.support.worlds import StoppingWorld, own_generator, run_ranks

CONFIG = small_config(epochs=2, ledger=True, commit_steps=4, keep_checkpoints=9)
STEPS = 20
OTHER = Path("other")
POISONED = {3, 17, 20, 41, 66, 78, 101, 120, 150, 189}


def record(
    to: Path = RUN,
    world: World | None = None,
    make: Any = convnet,
    data: Any = few_digits,
    **settings: Any,
) -> None:
    """Train with a ledger."""
    trained(world or LocalWorld(), CONFIG.replace(output_dir=to, **settings), make, data)


def test_a_run_that_stopped_has_the_answers_of_one_that_did_not() -> None:
    record()
    whole = answers_in(RUN)
    assert [*whole] == [*range(1, STEPS + 1)]
    record(OTHER, StoppingWorld(14))
    assert max(answers_in(OTHER)) < STEPS
    record(OTHER)
    assert answers_in(OTHER) == whole


def replayed(
    first: int,
    last: int,
    make: Any = convnet,
    data: Any = few_digits,
    world: World | None = None,
    **options: Any,
) -> list[ReplayedStep]:
    own = Own(lambda num_classes: own_generator(make(num_classes)), data)
    return [*replay(RUN, range(first, last + 1), world=world or LocalWorld(), own=own, **options)]


def numbers_of(step: ReplayedStep) -> list[int]:
    return [sample.number for sample in step.samples]


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}


class Checkpointed(nn.Module):
    """A model whose batch norm runs again in each backward pass."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        normed = checkpointed(self.norm, images, use_reentrant=False)
        return self.head(normed.flatten(1))


ADAM = {"clip_norm": 0.5, "ema_decay": 0.9, "optimizer": "adam"}


@pytest.mark.parametrize(
    ("make", "settings"), [(convnet, {}), (batch_norm, ADAM), (dropout, ADAM), (Checkpointed, {})]
)
def test_steps_of_one_rank_have_the_same_bits(make: Any, settings: dict[str, Any]) -> None:
    """Also over the end of an epoch; the run folder stays as it is."""
    record(make=make, **settings)
    before = files()
    expected = dict.fromkeys(range(7, 14), "same bits")
    expected[8] = expected[12] = "same bits, and the same state"
    assert {step.number: step.verdict for step in replayed(7, 13, make)} == expected
    assert files() == before


def poisoned(config: DataConfig) -> DataSet:
    """Return the digits, of which ten have pixels that are much too large."""
    digits = few_digits(config)
    images = digits.train.images.float()
    images[sorted(POISONED)] *= 20
    return replace(digits, train=Arrays(images, digits.train.labels, len(images)))


def test_poisoned_samples_are_named_first() -> None:
    record(data=poisoned, learning_rate=1e-4)
    seen = set()
    for step in replayed(11, STEPS, data=poisoned, top=20):
        numbers = numbers_of(step)
        bad = POISONED & {*numbers}
        assert {*numbers[: len(bad)]} == bad
        seen |= bad
    assert seen == POISONED


def test_a_run_of_several_ranks_that_lost_one_is_replayed_on_one_process() -> None:
    """Sums are added in another order, so steps differ by rounding."""
    hosts = dict([ONE, TWO, THREE])
    run_elastic(lambda world: record(world=world, batch_size=None), hosts, [Kill(9, 1)], first=3)
    for number in (5, 9, STEPS):
        (step,) = replayed(number, number, top=0)
        assert step.recorded is not None
        assert step.gap <= 1e-6


def test_a_state_that_differs_is_named() -> None:
    record()
    ledger = RUN / "ledger.jsonl"
    ledger.write_text(re.sub(r'/0": "\w+"', '/0": "ab"', ledger.read_text()))
    assert [step.verdict for step in replayed(8, 8)] == ["same bits, but another state"]


def test_ranks_replay_steps_together() -> None:
    """All of them know the samples of all."""
    record()
    alone = replayed(7, 8)
    for found in run_ranks(2, lambda world: replayed(7, 8, world=world)):
        for step, expected in zip(found, alone, strict=True):
            assert step.gap <= 1e-6
            assert numbers_of(step) == numbers_of(expected)


def test_the_tensors_of_a_step_are_written() -> None:
    record()
    replayed(7, 8, save_to=Path("step.pt"))
    saved = torch.load("step.pt", weights_only=True)
    assert saved["step"] == 8
    numbers = torch.cat([micro["samples"] for micro in saved["micro_batches"]])
    assert len({*numbers.tolist()}) == 20
    images, labels = saved["micro_batches"][2]["batch"]
    assert images.shape == (4, 1, 8, 8)
    assert torch.equal(labels, few_digits(DataConfig()).train.labels[numbers[8:12]])


@pytest.mark.parametrize(
    ("first", "last", "data", "why"),
    [
        (4, 5, few_digits, r"no commit before step 4: steps from 5 on can be replayed; --keep-che"),
        (18, 21, few_digits, r"run: its training ends before step 21"),
        (7, 8, poisoned, "a replay needs the data as they were"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(first: int, last: int, data: Any, why: str) -> None:
    record()
    with pytest.raises(UsageError, match=why):
        replayed(first, last, data=data)


def test_a_program_of_ones_own_is_refused() -> None:
    record()
    with pytest.raises(UsageError, match="was trained by a program of its own"):
        [*replay(RUN, range(7, 8), world=LocalWorld())]


def test_files_of_samples_are_named(tmp_path: Path) -> None:
    inner = ImageFiles(tmp_path, [("cat/1.png", 0), ("dog/2.png", 1)], lambda image: image, 100)
    numbers = TensorDataset(torch.zeros(1))
    data = ConcatDataset([ConcatDataset([numbers, inner]), Subset(inner, [1])])
    names = [file_of(data, number) for number in range(4)]
    assert names == ["", *(str(tmp_path / name) for name in ("cat/1.png", *["dog/2.png"] * 2))]


class Wrong(LocalWorld):
    """A world that makes an error in the gradient of one parameter, in one step."""

    def __init__(self, step: int, name: str) -> None:
        self._left = step
        self._name = name

    @override
    def reduce(self) -> Gradients:
        gradients = super().reduce()
        self._left -= 1
        if self._left == 0:
            place = ["0.weight", "0.bias", "4.weight", "4.bias"].index(self._name)
            gradients.tensors[place].view(-1)[0] += 2.0**-4
        return gradients


@pytest.mark.parametrize(
    ("wrong_step", "name"), [(3, "0.weight"), (11, "4.bias"), (STEPS - 1, "0.bias")]
)
def test_the_step_and_the_tensor_in_which_two_runs_part_are_named(
    wrong_step: int, name: str
) -> None:
    record(commit_steps=wrong_step)
    record(OTHER, Wrong(wrong_step, name), commit_steps=wrong_step, log_steps=7)
    is_same, (parting, tensors, *others) = difference(RUN, OTHER)
    assert not is_same
    assert parting.startswith(f"the runs part at step {wrong_step}: loss ")
    assert tensors.startswith(f"after step {wrong_step} 2 of 8 tensors differ: ")
    assert f"model/{name} by " in tensors
    assert "log_steps: 1, and 7" in others


def test_equal_runs_differ_in_nothing() -> None:
    record(commit_steps=None)
    record(OTHER, StoppingWorld(14), commit_steps=None)
    is_same, lines = difference(RUN, OTHER)
    assert not is_same
    assert re.match(r"only the first run has step 1\d; steps 1 to 1\d are the same", lines[0])
    record(OTHER, commit_steps=None)
    assert difference(RUN, OTHER) == (
        True,
        ["all 20 steps are the same", "all tensors of 1 commit, up to step 20, are the same"],
    )


@pytest.mark.parametrize(
    ("wrong_step", "line"),
    [
        (99, "the states after 4 steps, up to 16, are the same"),
        (6, "the states after step 8 differ"),
    ],
)
def test_states_whose_commits_are_gone_are_compared(wrong_step: int, line: str) -> None:
    record(keep_checkpoints=1)
    record(OTHER, Wrong(wrong_step, "4.bias"), keep_checkpoints=1)
    assert line in difference(RUN, OTHER)[1]


def test_the_numbers_of_ranks_differ() -> None:
    """Sums of other ranks are rounded in another way, so the digests differ."""
    record()
    run_elastic(lambda world: record(OTHER, world), dict([ONE, TWO]), [Kill(9, rank=1)], first=2)
    _, lines = difference(RUN, OTHER)
    ranks = "ranks: 1 from step 1, and 2 from step 1, 1 from step 9"
    assert any(line.startswith(ranks) for line in lines)


def test_other_data_are_named() -> None:
    record()
    record(OTHER, data=poisoned)
    _, lines = difference(RUN, OTHER)
    assert any(line.startswith("data/items/training: ") for line in lines)


def test_runs_without_a_ledger_and_a_common_commit_cannot_be_compared() -> None:
    record(ledger=False)
    record(OTHER, epochs=1, commit_steps=7)
    with pytest.raises(UsageError, match="nothing can be compared"):
        difference(RUN, OTHER)


def test_code_that_a_run_names_is_imported_only_with_trust() -> None:
    code = {"model": "tests.support.runs:convnet", "data": "tests.support.runs:few_digits"}
    train(CONFIG.replace(**code))
    with pytest.raises(UsageError, match="if you trust who wrote it, add --trust"):
        [*replay(RUN, range(7, 8), world=LocalWorld())]
    (step,) = replay(RUN, range(7, 8), world=LocalWorld(), trust=True)
    assert step.verdict == "same bits"
