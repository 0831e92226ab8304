"""Trainings whose samples are drawn by weight, sorted by length, or in an order of one's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from hvd_train.errors import UsageError
from hvd_train.progress.order import in_order
from hvd_train.run import evaluate
from hvd_train.run_files.ledger import audit
from hvd_train.session import Session
from hvd_train.world.world import LocalWorld
from tests.support.elastic import TOLERANCE
from tests.support.programs import DATA, Interrupted, check_survives, losses, plain, played
from tests.support.runs import (
    NUM_SAMPLES,
    RUN,
    convnet,
    equal,
    few_digits,
    largest_difference,
    small_config,
    trained,
    trained_on_changing_ranks,
)
from tests.support.worlds import StoppingWorld, run_ranks

NUMBERS = np.arange(NUM_SAMPLES) % 7.0  # weights or lengths
WEIGHTS = [0.0, 1.0, 2.0, 5.0] * 10  # of DATA
VERDICT = {
    "sample_weights": "exact: all 190 draws by weight counted as drawn, once in each of 3",
    "length_buckets": "exact: every one of 190 samples counted once in each of 3",
}


class InShards(TensorDataset):
    """A data set that reads shards in an order of theirs."""

    shard_starts = np.array([0, 20, 40])

    def __init__(self) -> None:
        super().__init__(*DATA.tensors)


@pytest.mark.parametrize(
    ("setting", "on_resize"),
    [("sample_weights", "global"), ("length_buckets", "global"), ("length_buckets", "per-worker")],
)
def test_a_run_is_exact_on_changing_ranks(setting: str, on_resize: str) -> None:
    """The audit finds the samples as drawn; one undisturbed rank has the same weights."""
    np.savetxt("numbers.txt", NUMBERS)
    np.save("same.npy", NUMBERS.astype(np.float32))
    settings = {"epochs": 3, "ledger": True, setting: "numbers.txt"}
    if on_resize == "per-worker":
        settings |= {"global_batch_size": None, "on_resize": on_resize, "lr_scaling": "linear"}
    config = small_config(commit_steps=2, **settings)
    ended = trained_on_changing_ranks(config)
    assert str(audit(RUN)).startswith(VERDICT[setting])
    if on_resize == "global":
        alone = small_config(**settings).replace(output_dir="alone")
        _, expected = trained(LocalWorld(), alone.replace(**{setting: "./same.npy"}))
        assert all(largest_difference(weights, expected) < TOLERANCE for _, weights in ended)
    Path("numbers.txt").unlink()  # an evaluation and an audit need no such file
    assert evaluate(RUN, model=convnet, data=few_digits, trust=True)["loss"] > 0
    assert not audit(RUN).faults


def test_a_session_may_draw_samples() -> None:
    """On 1, 2 and 3 ranks, after a resume, and if a rank is lost, the result is the same."""
    check_survives(plain, weights=WEIGHTS, ledger=True)
    (folder,) = Path().glob("*-elastic")
    assert str(audit(folder)).startswith("exact: all 40 draws by weight")


def turned(seed: int, epoch: int, num_samples: int) -> list[int]:
    """Return the samples backwards, and in each epoch from another one."""
    return [(19 * epoch - number) % num_samples for number in range(num_samples)]


def drawn(seed: int, epoch: int, num_samples: int) -> Tensor:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("order", "drop_last"), [(turned, True), (drawn, False)])
def test_an_order_of_ones_own_is_the_same_on_any_number_of_ranks(
    order: Callable[..., Any], drop_last: bool, ranks: int
) -> None:
    """The last samples of each epoch, which do not fill a global batch, may be left out.

    The audit knows it.
    """
    taken = []

    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for step in session.steps():
            for micro in step:
                micro.backward(losses(model, micro.batch))
                taken.append((step.number, micro.number, micro.samples.tolist()))

    settings = {"order": order, "drop_last": drop_last, "global_batch_size": 12, "ledger": True}
    run_ranks(ranks, lambda world: played(world, program, **settings))
    length = 36 if drop_last else 40
    expected = [int(n) for epoch in (0, 1) for n in order(0, epoch, 40)[:length]]
    assert [number for *_, samples in sorted(taken) for number in samples] == expected
    report = audit(RUN)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 6 if drop_last else 8)
    assert ("36 of 40 samples" in str(report)) == drop_last


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ({"weights": WEIGHTS}, [{}, {"lengths": WEIGHTS}, {"weights": WEIGHTS[::-1]}]),
        ({"order": turned}, [{}, {"order": in_order}, {"order": drawn}]),
    ],
)
def test_a_run_keeps_its_order(given: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Else samples of the epoch would be others than the recorded ones, or come twice."""
    with pytest.raises(Interrupted):
        played(LocalWorld(), plain, **given, stop_at=3)
    for other in others:
        with pytest.raises(UsageError, match=r"order|sample_weights"):
            played(LocalWorld(), plain, **other)
    of_ranks = given, others[-1]
    with pytest.raises(UsageError, match="the ranks differ in the order of samples"):
        run_ranks(
            2, lambda world: played(world, plain, Path("other"), **of_ranks[world.place.rank])
        )


def test_buckets_keep_their_batches() -> None:
    """Their order follows the layout, so that another one would repeat samples."""
    np.save("lengths.npy", NUMBERS)
    config = small_config(length_buckets="lengths.npy", commit_steps=1)
    trained(StoppingWorld(after=3), config)
    changed = config.replace(batch_size=5, resume=str(RUN), output_dir="changed")
    with pytest.raises(UsageError, match=r"cannot continue with other settings \(batch_size"):
        trained(LocalWorld(), changed)


def test_an_attribute_of_the_training_set_may_hold_the_numbers() -> None:
    data = TensorDataset(*DATA.tensors)
    data.lengths = WEIGHTS
    by_name, _, _ = played(LocalWorld(), plain, data=data, length_buckets="lengths")
    given, _, _ = played(LocalWorld(), plain, Path("given"), lengths=WEIGHTS)
    assert equal(by_name, given)
    part = Subset(data, range(20))
    with pytest.raises(UsageError, match=r"--length-buckets lengths: .* for each of the 20 "):
        played(LocalWorld(), plain, Path("part"), data=part, length_buckets="lengths")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sample_weights": "none/w.npy"}, "none/w.npy: No such file"),
        ({"sample_weights": "missing"}, "no such attribute; type a file as ./missing"),
        ({"sample_weights": "./words.txt"}, "one number for each sample .could not convert"),
        ({"sample_weights": "bytes.bin"}, "is neither .npy nor text"),
        ({"sample_weights": "damaged.npy"}, "is neither .npy nor text"),
        (
            {"lengths": np.ones(39)},
            r"Session\(lengths=...\): the shape is \[39\]; .* each of the 40 training",
        ),
        ({"length_buckets": "objects.npy"}, "is neither .npy nor text .Object arrays"),
        ({"weights": np.zeros(40)}, "all numbers are 0"),
        ({"weights": [*range(39), -1]}, "sample 39 has -1; it must be finite and at least 0"),
        ({"weights": [*range(39), np.inf]}, "sample 39 has inf"),
        ({"lengths": [np.nan] * 40}, "sample 0 has nan"),
        ({"weights": WEIGHTS, "lengths": WEIGHTS}, "--sample-weights and --length-buckets are"),
        ({"weights": WEIGHTS, "sample_weights": "w.npy"}, "--sample-weights and weights="),
        ({"weights": WEIGHTS, "order": in_order}, "--order and --sample-weights are different"),
        ({"lengths": WEIGHTS, "order": lambda *_: range(40)}, "order=... does not go with weights"),
        ({"weights": WEIGHTS, "data": InShards()}, "--sample-weights: add --shuffle-window 0"),
        (
            {"order": lambda seed, epoch: range(9)},
            r"order=<lambda> must return each number from 0 to 39 once, for epoch 0",
        ),
        ({"order": lambda *_: [0] * 40}, "must return each number from 0 to 39 once"),
        (
            {"order": lambda *_: np.random.default_rng().permutation(40)},
            "when it is called again",
        ),
        ({"order": "in-order"}, "give a function, such as hvd_train.in_order"),
    ],
)
def test_numbers_and_orders_that_cannot_be_used_are_one_line(
    given: dict[str, Any], says: str
) -> None:
    np.save("objects.npy", np.array([{}] * 40))
    Path("words.txt").write_text("1\ntwo\n")
    Path("bytes.bin").write_bytes(b"\xff\xfe")
    Path("damaged.npy").write_bytes(b"\x93NUMPY\1\0\4\0((((")
    with pytest.raises(UsageError, match=says) as caught:
        played(LocalWorld(), plain, **given)
    assert "\n" not in str(caught.value)
    assert not RUN.exists()
