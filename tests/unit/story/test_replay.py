"""The answers of steps in the ledger, steps that are trained again, and runs that are compared."""

import random
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
POISONED = {3, 17, 20, 41, 66, 78, 101, 120, 150, 189}


def test_a_run_that_stopped_has_the_answers_of_one_that_did_not() -> None:
    trained(LocalWorld(), CONFIG)
    whole = answers_in(RUN)
    assert [*whole] == [*range(1, STEPS + 1)]
    stopped = CONFIG.replace(output_dir=Path("stopped"))
    trained(StoppingWorld(14), stopped)
    assert max(answers_in(Path("stopped"))) < STEPS
    trained(LocalWorld(), stopped)
    assert answers_in(Path("stopped")) == whole


def replayed(
    first: int,
    last: int,
    make: Any = convnet,
    data: Any = few_digits,
    world: World | None = None,
    **options: Any,
) -> list[ReplayedStep]:
    model = lambda num_classes: own_generator(make(num_classes))  # noqa: E731
    steps = range(first, last + 1)
    return [*replay(RUN, steps, world=world or LocalWorld(), own=Own(model, data), **options)]


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
    trained(LocalWorld(), CONFIG.replace(**settings), make)
    before = files()
    found = replayed(7, 13, make)
    assert [step.number for step in found] == [*range(7, 14)]
    assert [step.number for step in found if step.has_same_state] == [8, 12]
    assert {step.verdict for step in found} == {"same bits", "same bits, and the same state"}
    assert files() == before


def poisoned(config: DataConfig) -> DataSet:
    """Return the digits, of which ten have pixels that are much too large."""
    digits = few_digits(config)
    images = digits.train.images.float()
    images[sorted(POISONED)] *= 20
    return replace(digits, train=Arrays(images, digits.train.labels, len(images)))


def test_poisoned_samples_are_named_first() -> None:
    trained(LocalWorld(), CONFIG.replace(learning_rate=1e-4), data=poisoned)
    found = replayed(11, STEPS, data=poisoned, top=20)
    seen = set[int]()
    for step in found:
        numbers = [sample.number for sample in step.samples]
        bad = POISONED & {*numbers}
        assert {*numbers[: len(bad)]} == bad
        seen |= bad
    assert seen == POISONED


def test_a_run_of_several_ranks_that_lost_one_is_replayed_on_one_process() -> None:
    """Sums are added in another order, so steps differ by rounding."""
    config = CONFIG.replace(batch_size=None)
    run_elastic(
        lambda world: trained(world, config),
        dict([ONE, TWO, THREE]),
        [Kill(9, rank=1)],
        first=3,
    )
    numbers = random.Random(5).sample(range(5, STEPS + 1), 8)
    for number in numbers:
        (step,) = replayed(number, number, top=0)
        assert step.recorded is not None
        assert step.gap <= 1e-6


def test_a_state_that_differs_is_named() -> None:
    trained(LocalWorld(), CONFIG)
    ledger = RUN / "ledger.jsonl"
    ledger.write_text(re.sub(r'/0": "\w+"', '/0": "ab"', ledger.read_text()))
    assert [step.verdict for step in replayed(8, 8)] == ["same bits, but another state"]


def test_ranks_replay_steps_together() -> None:
    """All of them know the samples of all."""
    trained(LocalWorld(), CONFIG)
    alone = replayed(7, 8)
    for found in run_ranks(2, lambda world: replayed(7, 8, world=world)):
        for step, expected in zip(found, alone, strict=True):
            assert step.gap <= 1e-6
            assert [each.number for each in step.samples] == [
                each.number for each in expected.samples
            ]


def test_the_tensors_of_a_step_are_written() -> None:
    trained(LocalWorld(), CONFIG)
    replayed(7, 8, save_to=Path("step.pt"))
    saved = torch.load("step.pt", weights_only=True)
    assert saved["step"] == 8
    numbers = torch.cat([micro["samples"] for micro in saved["micro_batches"]])
    assert len({*numbers.tolist()}) == 20
    images, labels = saved["micro_batches"][2]["batch"]
    assert images.shape == (4, 1, 8, 8)
    digits = few_digits(DataConfig())
    assert torch.equal(labels, digits.train.labels[numbers[8:12]])


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (range(4, 6), r"no commit before step 4: steps from 5 on can be replayed; --keep-check"),
        (range(18, 22), r"run: its training ends before step 21"),
    ],
)
def test_steps_that_cannot_be_replayed_are_named(steps: range, why: str) -> None:
    trained(LocalWorld(), CONFIG)
    with pytest.raises(UsageError, match=why):
        replayed(steps[0], steps[-1])


def test_other_data_are_refused() -> None:
    trained(LocalWorld(), CONFIG)
    with pytest.raises(UsageError, match="a replay needs the data as they were"):
        replayed(7, 8, data=poisoned)


def test_a_program_of_ones_own_is_refused() -> None:
    trained(LocalWorld(), CONFIG)
    with pytest.raises(UsageError, match="was trained by a program of its own"):
        [*replay(RUN, range(7, 8), world=LocalWorld())]


def test_files_of_samples_are_named(tmp_path: Path) -> None:
    inner = ImageFiles(tmp_path, [("cat/1.png", 0), ("dog/2.png", 1)], lambda image: image, 100)
    numbers = TensorDataset(torch.zeros(2))
    data = ConcatDataset([ConcatDataset([numbers, inner]), Subset(inner, [1])])
    names = [file_of(data, number) for number in range(len(data))]
    assert names == ["", "", str(tmp_path / "cat/1.png"), *[str(tmp_path / "dog/2.png")] * 2]


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


@pytest.mark.parametrize("seed", range(10))
def test_the_step_and_the_tensor_in_which_two_runs_part_are_named(seed: int) -> None:
    drawn = random.Random(seed)
    wrong_step = drawn.randint(2, STEPS - 1)
    name = drawn.choice(["0.weight", "0.bias", "4.weight", "4.bias"])
    config = CONFIG.replace(commit_steps=wrong_step)
    trained(LocalWorld(), config)
    trained(Wrong(wrong_step, name), config.replace(output_dir=Path("wrong"), log_steps=7))
    is_same, lines = difference(RUN, Path("wrong"))
    assert not is_same
    assert lines[0].startswith(f"the runs part at step {wrong_step}: loss ")
    tensors = f"after step {wrong_step} 2 of 8 tensors differ: "
    assert lines[1].startswith(tensors)
    assert f"model/{name} by " in lines[1]
    assert "log_steps: 1, and 7" in lines


def test_equal_runs_differ_in_nothing() -> None:
    config = CONFIG.replace(commit_steps=None, commit_seconds=None)
    trained(LocalWorld(), config)
    trained(StoppingWorld(14), config.replace(output_dir=Path("other")))
    is_same, lines = difference(RUN, Path("other"))
    assert not is_same
    assert re.match(r"only the first run has step 1\d; steps 1 to 1\d are the same", lines[0])
    trained(LocalWorld(), config.replace(output_dir=Path("other")))
    assert difference(RUN, Path("other")) == (
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
    config = CONFIG.replace(keep_checkpoints=1)
    trained(LocalWorld(), config)
    trained(Wrong(wrong_step, "4.bias"), config.replace(output_dir=Path("other")))
    assert line in difference(RUN, Path("other"))[1]


def test_the_numbers_of_ranks_differ() -> None:
    """Sums of other ranks are rounded in another way, so the digests differ."""
    trained(LocalWorld(), CONFIG)
    other = CONFIG.replace(output_dir=Path("other"))
    run_elastic(lambda world: trained(world, other), dict([ONE, TWO]), [Kill(9, rank=1)], first=2)
    _, lines = difference(RUN, Path("other"))
    ranks = "ranks: 1 from step 1, and 2 from step 1, 1 from step 9"
    assert any(line.startswith(ranks) for line in lines)


def test_other_data_are_named() -> None:
    trained(LocalWorld(), CONFIG)
    trained(LocalWorld(), CONFIG.replace(output_dir=Path("other")), data=poisoned)
    _, lines = difference(RUN, Path("other"))
    assert any(line.startswith("data/items/training: ") for line in lines)


def test_runs_without_a_ledger_and_a_common_commit_cannot_be_compared() -> None:
    trained(LocalWorld(), CONFIG.replace(ledger=False))
    other = Path("other")
    trained(LocalWorld(), CONFIG.replace(output_dir=other, epochs=1, commit_steps=7))
    with pytest.raises(UsageError, match="nothing can be compared"):
        difference(RUN, other)


def test_code_that_a_run_names_is_imported_only_with_trust() -> None:
    code = {"model": "tests.support.runs:convnet", "data": "tests.support.runs:few_digits"}
    train(CONFIG.replace(**code))
    with pytest.raises(UsageError, match="if you trust who wrote it, add --trust"):
        [*replay(RUN, range(7, 8), world=LocalWorld())]
    (step,) = replay(RUN, range(7, 8), world=LocalWorld(), trust=True)
    assert step.verdict == "same bits"
