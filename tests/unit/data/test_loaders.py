"""Batches of data sets in memory, and of data sets that are read item by item."""

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hvd_train.data.by_value import ByValue, digest_of_pickle
from hvd_train.data.dataset import Arrays, Augment, DataSet
from hvd_train.data.loader import ArrayLoader, MapLoader, Prepare
from hvd_train.errors import DataTimeout, UsageError
from hvd_train.progress.order import Batch, BatchLayout, EpochOrder, Order, assignments
from hvd_train.progress.sampling import drawn_by
from tests.support.launching import wait_for
from tests.support.runs import CPU, PLAIN, PLAIN_DATA, RandomItems, flat

LAYOUT = BatchLayout(8, 3)


@pytest.mark.parametrize("colour", [False, True])
def test_images_are_scaled_resized_normalised_and_coloured_in_this_order(colour: bool) -> None:
    """A loader gives what this makes of the images of a micro-batch, to the bit."""
    data = DataSet((), None, ("a",), channels=1, mean=(0.5,), std=(0.25,))
    prepare = Prepare(data, CPU, image_size=4, augment=None, colour=colour, channels_last=colour)
    assert torch.equal(
        prepare(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), None),
        torch.full((2, 3 if colour else 1, 4, 4), 2.0),
    )
    stored = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (20, 1, 6, 6), np.uint8))
    loader = ArrayLoader(Arrays(stored.clone(), torch.arange(20), 20), prepare, CPU, seed=0)
    for batch in loader.load(1, assignments(EpochOrder(0, 1, 20), 0, BatchLayout(3, 2), 0, 1)):
        for micro in batch.micro_batches:
            images = micro.batch[0]
            assert torch.equal(images, prepare(stored[torch.from_numpy(micro.samples)], None))
            assert not colour or images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
def test_one_pass_differs_by_rounding_alone(
    channels: int, channels_last: bool, normalises: bool
) -> None:
    """Images that are scaled and normalised in one pass have the same values and layout."""
    mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if normalises else ((), ())
    data = DataSet((), None, ("a",), channels=channels, mean=mean, std=std)
    images = torch.arange(256).repeat(channels).view(1, channels, 16, 16).to(torch.uint8)
    settings = {"image_size": 16, "augment": None, "colour": True, "channels_last": channels_last}
    usual, other = (
        Prepare(data, CPU, in_one_pass=in_one_pass, **settings)(images, None)  # type: ignore[arg-type]
        for in_one_pass in (False, True)
    )
    # three roundings here, and up to four there, of numbers below 4.5
    torch.testing.assert_close(other, usual, rtol=0.0, atol=7 * 4.5 * 2**-24)
    if channels_last:
        assert other.is_contiguous(memory_format=torch.channels_last)


def read(
    loader: MapLoader, epoch: int = 0, start: int = 0, layout: BatchLayout = LAYOUT
) -> Iterator[Batch]:
    """Read an epoch of 30 samples, from a cursor on."""
    return loader.load(epoch, assignments(EpochOrder(1, epoch, 30), start, layout, 0, 1))


def test_loader_processes_change_nothing() -> None:
    """Also if an epoch is resumed or left in the middle."""
    alone, others = (
        MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=number) for number in (0, 2)
    )
    others.start()
    with closing(alone), closing(others):
        first, second = (flat([*read(loader), *read(loader, 1)]) for loader in (alone, others))
        for loader in (alone, others):
            assert torch.equal(flat([*read(loader, start=16)]), first[16:30]), "at a cursor"
            next(read(loader))
            whole = flat([*read(loader, layout=BatchLayout(8, 8))])
            assert torch.equal(whole, first[:30]), "after an epoch that was left"
    assert torch.equal(first, second)
    epochs = [half[half[:, 0].argsort()] for half in first.split(30)]
    assert epochs[0][:, 0].tolist() == [*range(30)]
    assert not (epochs[0][:, 1:] == epochs[1][:, 1:]).any(), "each has its own random numbers"


def first_numbers(
    loader: ArrayLoader | MapLoader, size: int, layout: BatchLayout, epoch: int = 1
) -> Tensor:
    """Return the first random number of each draw of sample 3, in the order of the epoch."""
    order = drawn_by(np.eye(30)[3])(0, epoch, 30, layout)
    parts = {
        (step, micro.number): micro.batch[0].flatten(1)[:, 1]
        for rank in range(size)
        for step, batch in enumerate(loader.load(epoch, assignments(order, 0, layout, rank, size)))
        for micro in batch.micro_batches
    }
    return torch.cat([parts[place] for place in sorted(parts)])


def augmented() -> ArrayLoader:
    """Return a loader of 30 images in memory, to which a random number is added."""
    augment = Augment(1, lambda images, drawn: images + drawn.view(-1, 1, 1, 1))
    prepare = Prepare(PLAIN_DATA, CPU, image_size=None, augment=augment, colour=False)
    return ArrayLoader(Arrays(torch.zeros(30, 1, 1, 2), torch.zeros(30), 30), prepare, CPU, 0)


@pytest.mark.parametrize("num_workers", [None, 0, 1])
def test_each_draw_of_a_sample_has_its_own_random_numbers(num_workers: int | None) -> None:
    """Also of a set in memory, and in each epoch; they depend on neither the batches nor the
    number of ranks.
    """
    loader = augmented()
    if num_workers is not None:
        loader = MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=num_workers)
    with closing(loader):
        alone = first_numbers(loader, 1, LAYOUT)
        assert len(alone.unique()) == 30
        for layout in (BatchLayout(5, 2), BatchLayout(3, 3)):  # then one rank has no micro-batch
            assert torch.equal(first_numbers(loader, 2, layout), alone)
        assert not set(alone.tolist()) & set(first_numbers(loader, 1, LAYOUT, epoch=2).tolist())


class SameItems(TensorDataset):
    """Is read item by item, since it may make items itself."""


def test_tensors_are_read_in_whole_batches_of_the_same_items() -> None:
    """Also in loader processes."""
    tensors = torch.rand(30, 3), torch.arange(30), torch.rand(30, 2, 2)

    def batches(data: TensorDataset, num_workers: int) -> list[Any]:
        with closing(MapLoader(data, None, CPU, 0, num_workers)) as loader:
            return [micro.batch for batch in read(loader) for micro in batch.micro_batches]

    expected = batches(SameItems(*tensors), 0)
    for num_workers in (0, 1):
        for batch, item_by_item in zip(
            batches(TensorDataset(*tensors), num_workers), expected, strict=True
        ):
            assert type(batch) is type(item_by_item)
            assert all(map(torch.equal, batch, item_by_item))


def test_processes_get_what_a_function_defines() -> None:
    """Classes, functions and tensors, without an import of the script."""
    values = torch.arange(6.0)

    class Local(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return 2 * values[index]

    loader = MapLoader(
        Local(range(6)), None, CPU, 0, 2, collate=lambda items: torch.stack(items) + 1
    )
    with closing(loader):
        (batch,) = loader.load(0, assignments(Order(6), 0, BatchLayout(6, 6), 0, 1))
        assert batch.micro_batches[0].batch.tolist() == [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (
            KeyError("label"),
            UsageError,
            r"item 0 of the data raised KeyError: 'label' \(.*, line \d+, in __getitem__",
        ),
        (DataTimeout("the store is away"), DataTimeout, "^the store is away$"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_an_item_names_it_and_its_place(
    num_workers: int, error: Exception, kind: type[Exception], says: str
) -> None:
    """A loader process would lose the traceback; a store that fails is no error of use."""

    class Broken(RandomItems):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise error

    loader = MapLoader(Broken(), None, CPU, seed=0, num_workers=num_workers)
    with closing(loader), pytest.raises(kind, match=says):
        next(loader.load(0, assignments(Order(6), 0, BatchLayout(1, 1), 0, 1)))


def test_a_data_set_that_cannot_be_sent_to_processes_is_an_error_of_use() -> None:
    data = RandomItems()
    data.closure = (number for number in range(3))
    MapLoader(data, PLAIN, CPU, seed=0, num_workers=0).start()
    with pytest.raises(UsageError, match=r"cannot be sent the data set \(.*; type --workers 0$"):
        MapLoader(data, PLAIN, CPU, seed=0, num_workers=2).start()


class Curriculum:
    """Items of a level, which a program or `begin_epoch` sets."""

    def __init__(self) -> None:
        self.level = 0.0
        self.offset = {"by": 0}
        self.rows = np.zeros(3)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.level + self.offset["by"], self.rows.sum()])


class Opens(Curriculum):
    """Opens a file, as h5py does, with the first item."""

    file = None

    def __getitem__(self, index: int) -> Tensor:
        self.file = self.file or open(__file__, "rb")  # noqa: SIM115
        return super().__getitem__(index)


class EpochLevels(Curriculum):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def begin_epoch(self, epoch: int) -> None:
        self.level = epoch + torch.rand(()).item()
        self.seen.append(epoch)


def levels(loader: MapLoader, epoch: int) -> list[list[float]]:
    batches = loader.load(epoch, assignments(Order(12), 0, BatchLayout(4, 2), 0, 1))
    items = torch.cat([micro.batch for batch in batches for micro in batch.micro_batches])
    return items.unique(dim=0).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_begin_epoch_is_called_before_the_first_item(num_workers: int) -> None:
    """In this process and in loader processes, with the same random numbers;
    also within other data sets.
    """
    data = EpochLevels()
    found = []
    whole = ConcatDataset([Subset(data, range(12))])
    with closing(MapLoader(whole, None, CPU, seed=3, num_workers=num_workers)) as loader:
        loader.start()
        for epoch in (0, 0, 1, 5):
            found += levels(loader, epoch)
            assert found[-1] == [pytest.approx(data.level), 0]
        loader.example(2)
    assert [int(level) for level, _ in found] == [0, 0, 1, 5]
    assert len({level % 1 for level, _ in found}) == 3
    assert data.seen == [0, 1, 5]
    with closing(MapLoader(EpochLevels(), None, CPU, seed=3, num_workers=0)) as alone:
        assert levels(alone, 5) == found[-1:]


def test_a_change_between_epochs_reaches_loader_processes() -> None:
    """Of a plain value, of one that an attribute holds, and of an array."""
    data = Curriculum()
    with closing(MapLoader(Subset(data, range(12)), None, CPU, seed=3, num_workers=1)) as loader:
        assert levels(loader, 0) == [[0, 0]]
        data.level = 1
        assert levels(loader, 1) == [[1, 0]]
        data.offset["by"] = 7
        assert levels(loader, 2) == [[8, 0]]
        data.rows[1] = 3
        assert levels(loader, 3) == [[8, 3]]


def test_a_set_may_open_a_file_in_the_process_of_the_training() -> None:
    """Which cannot be sent: loader processes keep the set that they have."""
    data = Opens()
    with closing(MapLoader(data, None, CPU, seed=3, num_workers=1)) as loader:
        assert levels(loader, 0) == [[0, 0]]
        with closing((data[0], data.file)[1]):
            assert levels(loader, 1) == [[0, 0]]


def test_a_change_within_an_epoch_is_refused() -> None:
    """Loader processes have read ahead."""
    data = Curriculum()
    with closing(MapLoader(data, None, CPU, seed=3, num_workers=1)) as loader:
        batches = loader.load(0, assignments(Order(12), 0, BatchLayout(4, 2), 0, 1))
        next(batches)
        data.level = 1
        with pytest.raises(
            UsageError, match=r"Curriculum.level of the data was changed .* or type --workers 0"
        ):
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_items_that_are_never_the_same_are_refused(num_workers: int) -> None:
    class Unseeded(RandomItems):
        generator = np.random.default_rng()

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.tensor([self.generator.random()]), 0

    class Seeded(RandomItems):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.tensor([np.random.default_rng(torch.initial_seed()).random()]), 0

    with closing(MapLoader(Seeded(), None, CPU, seed=3, num_workers=num_workers)) as loader:
        assert loader.start() == loader.digest()
    with pytest.raises(
        UsageError, match=r"differ when they are read again.*torch.initial_seed\(\)$"
    ):
        MapLoader(Unseeded(), None, CPU, seed=3, num_workers=num_workers).start()


def test_a_data_set_that_grows_is_refused() -> None:
    data = [torch.zeros(1)] * 6
    loader = MapLoader(data, None, CPU, seed=0, num_workers=0)  # type: ignore[arg-type]
    data.append(torch.zeros(1))
    with pytest.raises(UsageError, match="had 6 samples, and has 7 now"):
        next(loader.load(0, assignments(Order(6), 0, BatchLayout(2, 2), 0, 1)))


@pytest.mark.slow  # starts two processes that import torch
def test_a_loader_process_ends_with_its_rank() -> None:
    """Also if the rank is killed, and no launcher looks for what is left."""
    program = """if True:
        import os, psutil, signal
        from hvd_train.data.loader import MapLoader
        from tests.support.runs import CPU, RandomItems
        loader = MapLoader(RandomItems(), None, CPU, 0, 1)
        loader.start()
        print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    rank = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert rank.returncode == -signal.SIGKILL, rank.stderr
    processes = [int(word) for word in rank.stdout.split()]
    assert len(processes) == 3, "a loader process, and Python's two servers for it"
    wait_for("their end", lambda: not any(map(psutil.pid_exists, processes)), 60)
    assert "leaked" not in rank.stderr


def test_a_memory_mapped_file_is_not_sent_but_mapped() -> None:
    """Of arrays, their views, and tensors; what only this process sees is sent."""
    np.arange(2**20, dtype=np.int32).tofile("rows.bin")
    rows = np.memmap("rows.bin", np.int32, "r").reshape(-1, 256)
    own = np.memmap("rows.bin", np.int32, "c")
    own[-1] = 7
    views = {
        "whole": rows,
        "upside down": rows[10:][::-1],
        "columns": np.asarray(rows)[:, 3:250:2].T,
        "tensor": torch.from_file("rows.bin", shared=True, size=2**20, dtype=torch.int32)[5:],
        "own": own,
    }
    sizes = {}
    for name, view in views.items():
        content = pickle.dumps(ByValue(view, 0))
        sizes[name] = len(content)
        assert np.array_equal(pickle.loads(content), view), name
    assert [name for name, size in sizes.items() if size > 5000] == ["own"]
    before = digest_of_pickle(views)
    own[-1] = 8
    assert digest_of_pickle(views) != before
