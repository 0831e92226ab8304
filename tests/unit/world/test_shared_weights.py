"""One copy of the weights for several processes: they update it as one would, and outlive one another at any moment."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.errors import RankLost
from hvd_train.world import shared_weights, step_in_c
from hvd_train.world.host_memory import HostMemory
from hvd_train.world.shard_update import ChunkUpdate, UpdateByChunks
from hvd_train.world.shared_weights import Plan, SharedGradient, SharedWeights, can_be_shared, give_numbers
from hvd_train.world.step_in_c import rounding_of
from tests.support import torn

FORK = mp.get_context("fork")
LIMIT_S = 20
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "decay": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
}
Hook = Callable[[SharedWeights, int, int], None]
"""Called on each rank before each step, with the rank and the number of the step."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a shard of a small network has several."""
    monkeypatch.setattr(shared_weights, "_CHUNK", 50)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """So that processes can be forked, which lack the other threads of OpenMP."""


def network() -> nn.Module:
    """Return a small network with a frozen layer, in the order of memory that GPUs like."""
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 7)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def set_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Give the trained parameters the gradients of this rank in this step, some of them in another order of memory."""
    torch.manual_seed(100 * step + rank)
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad and not (number == 1 and rank == 1):  # one that rank 1 lacks
            gradient = torch.randn(parameter.shape)
            parameter.grad = gradient if number % 2 else torch.empty_like(parameter).copy_(gradient)


def numbers_of(model: nn.Module, optimizer: Optimizer) -> list[NDArray[Any]]:
    """Return copies of the weights and of all that the optimizer keeps for those that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [value for p in trained for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [tensor.detach().numpy().copy() for tensor in (*model.parameters(), *kept)]


def alone(kind: str, size: int, steps: int, factor: float | None = None) -> tuple[list[NDArray[Any]], list[float]]:
    """Return what one process has after these steps by the sum of the gradients of `size` ranks, and their norms."""
    model = network()
    optimizer, norms = KINDS[kind](model.parameters()), []
    give_numbers(optimizer, KINDS[kind])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in trained]
        for rank in range(size):
            for parameter in trained:
                parameter.grad = None
            set_gradients(model, rank, step)
            for total, parameter in zip(sums, trained, strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        for total, parameter in zip(sums, trained, strict=True):
            parameter.grad = total if factor is None else total * factor
        norms.append(float(torch.linalg.vector_norm(torch.cat([total.flatten() for total in sums]))))
        optimizer.step()
    return numbers_of(model, optimizer), norms


def together(
    kind: str,
    size: int,
    hook: Hook = lambda *_: None,
    factor: float | None = None,
    steps: int = 3,
    *,
    leave_together: bool = False,
    in_c: bool = False,
    make: Callable[[], nn.Module] = network,
) -> dict[int, Any]:
    """Let ranks take the steps, and return by rank what each has in the end, its norms, and how it ended.

    With `leave_together` none has weights of its own again before all have ended; with `in_c` updates are made in C.
    """
    model = make()
    optimizer = KINDS[kind](model.parameters())
    give_numbers(optimizer, KINDS[kind])
    num_bytes = Plan(optimizer, size).num_bytes
    memory, address = HostMemory.made(num_bytes)
    met, pipes, processes = FORK.Barrier(size), [], []

    def body(rank: int, pipe: Any) -> None:
        plan = Plan(optimizer, size)
        mine = HostMemory.opened(address, num_bytes)
        rounding = rounding_of(optimizer, KINDS[kind]) if in_c else None
        assert not in_c or rounding is not None
        weights = SharedWeights(mine, plan, rank, optimizer, KINDS[kind], rounding)
        weights.claim()
        weights.copy_in()
        met.wait(LIMIT_S)
        weights.move_in()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights.cut(trained)
        norms, end, step = [], "", 0
        try:
            for step in range(steps):
                hook(weights, rank, step)
                set_gradients(model, rank, step)
                for parameter in reversed(trained):
                    weights.put([parameter])
                met.wait(LIMIT_S)  # as the ranks do by what travels with a step
                weights.sum()
                gradient = SharedGradient(weights)
                norms.append(gradient.read(torch.zeros(1))[1])
                gradient.take_step(factor)
        except RankLost:
            end = f"lost in step {step}"
        if leave_together:
            met.wait(LIMIT_S)
        weights.move_out()
        pipe.send((numbers_of(model, optimizer), norms, end))

    for rank in range(size):
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=body, args=(rank, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results: dict[int, Any] = {}
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        results[rank] = None
        if pipe.poll(2 * LIMIT_S):
            try:
                results[rank] = pipe.recv()
            except EOFError:
                process.join(LIMIT_S)
                results[rank] = process.exitcode
        process.kill()
        process.join()
    del memory
    return results


def undisturbed(kind: str, size: int, steps: int = 3, **how: Any) -> list[NDArray[Any]]:
    """Return what all ranks have after steps in which nothing happens."""
    numbers: list[NDArray[Any]] = together(kind, size, steps=steps, **how)[0][0]
    return numbers


def close(mine: list[NDArray[Any]], others: list[NDArray[Any]]) -> bool:
    """Return whether numbers differ by no more than roundings: vector units add and multiply the last ones apart.

    Three steps have some ten operations each, and each rounds by 2^-24 of what may be as large as the largest.
    """
    largest = [max(1.0, float(np.abs(numbers).max())) for numbers in others]
    return all(
        np.abs(one - other).max() <= 64 * 2**-24 * most for one, other, most in zip(mine, others, largest, strict=True)
    )


def same(mine: list[NDArray[Any]], others: list[NDArray[Any]]) -> bool:
    """Return whether all numbers are equal to the last bit."""
    return len(mine) == len(others) and all(np.array_equal(*pair) for pair in zip(mine, others, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_the_steps_of_one(kind: str, size: int) -> None:
    """Gradients are added in the order of ranks, frozen weights stay, and the norm is that of the sum."""
    expected, norms = alone(kind, size, 3)
    for rank, (numbers, of_rank, end) in together(kind, size).items():
        assert end == "", rank
        assert close(numbers, expected), rank
        # Each rounding adds at most 2^-24 of the sum of squares, of which the root takes half.
        assert of_rank == pytest.approx(norms, rel=sum(numbers.size for numbers in expected) * 2**-24)


@pytest.mark.parametrize(("kind", "size", "factor"), [("sgd", 2, 0.3), ("momentum", 3, None), ("decay", 2, 0.3)])
def test_steps_in_c_are_those_of_torch(kind: str, size: int, factor: float | None) -> None:
    """To the last bit, however the shards are cut: so ranks that share weights and ranks that do not have the same."""
    expected, norms = alone(kind, size, 3, factor)
    for rank, (numbers, of_rank, end) in together(kind, size, factor=factor, in_c=True).items():
        assert end == "", rank
        assert same(numbers, expected), rank
        assert of_rank == pytest.approx(norms, rel=sum(numbers.size for numbers in expected) * 2**-24)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_without_a_compiler(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was compiled torch adds up in the same order, to the same bits."""
    in_c = undisturbed("adamw", size)
    monkeypatch.setattr(step_in_c, "_library", lambda: None)
    assert same(undisturbed("adamw", size), in_c)


def test_a_part_of_the_gradient() -> None:
    """A clipped step is that of the scaled sum."""
    expected, _ = alone("momentum", 2, 3, factor=0.25)
    assert all(close(numbers, expected) for numbers, _, _ in together("momentum", 2, factor=0.25).values())


def chunks_of(weights: SharedWeights, shard: int) -> Sequence[ChunkUpdate]:
    """Return the chunks in which torch updates a shard."""
    update = weights._update_of(shard)
    assert isinstance(update, UpdateByChunks)
    return update.chunks


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies(weights: SharedWeights, where: str) -> None:
    """Have this rank kill itself at a moment of its next step."""
    update, sums = weights.update, weights.sum
    chunks = chunks_of(weights, weights._rank)
    keep, take = chunks[1].keep, chunks[1].update

    def torn(factor: float | None) -> None:
        take(factor)
        for numbers in chunks[1]._changing:
            numbers[: len(numbers) // 2 + 1] = 1e9
        _die()

    def summed_and_dead(factor: float | None) -> None:
        _die()

    def updated_and_dead(factor: float | None) -> None:
        weights._update_shard(weights._rank, factor)
        _die()

    def half_kept(log: Tensor) -> None:
        log.fill_(1e9)
        _die()

    def kept(log: Tensor) -> None:
        keep(log)
        _die()

    def before_sum() -> None:
        _die()

    moments: dict[str, tuple[object, str, object]] = {
        "before it sums": (weights, "sum", before_sum),
        "before it updates": (weights, "update", summed_and_dead),
        "while it keeps a chunk": (chunks[1], "keep", half_kept),
        "when a chunk is kept": (chunks[1], "keep", kept),
        "in the middle of a chunk": (chunks[1], "update", torn),
        "when it has updated": (weights, "update", updated_and_dead),
    }
    assert (update, sums) == (weights.update, weights.sum)
    setattr(*moments[where])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "where",
    [
        "before it updates",
        "while it keeps a chunk",
        "when a chunk is kept",
        "in the middle of a chunk",
        "when it has updated",
    ],
)
def test_a_rank_that_dies_in_the_update(where: str, size: int) -> None:
    """The others finish the step in its place, to the bit."""

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if (rank, step) == (1, 2):
            _dies(weights, where)

    results = together("adamw", size, hook)
    expected = undisturbed("adamw", size)
    assert results.pop(1) == -signal.SIGKILL
    assert len(results) == size - 1
    for numbers, _, end in results.values():
        assert end == ""
        assert same(numbers, expected)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the functions in C with small blocks, in which a process can be killed at each moment."""
    return step_in_c.load(torn.compiled(tmp_path_factory.mktemp("torn"), block=16))


@pytest.mark.parametrize("moment", torn.MOMENTS)
@pytest.mark.parametrize(("kind", "size"), [("sgd", 2), ("momentum", 3)])
def test_a_rank_that_dies_in_the_update_in_c(
    kind: str, moment: str, size: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others finish the step in its place, to the bit."""
    monkeypatch.setattr(step_in_c, "_library", lambda: library)

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if (rank, step) == (1, 2):
            ctypes.c_int.in_dll(library, "moment").value = 1 + torn.MOMENTS.index(moment)

    results = together(kind, size, hook, in_c=True)
    expected = undisturbed(kind, size, in_c=True)
    assert results.pop(1) == -signal.SIGKILL
    assert len(results) == size - 1
    for numbers, _, end in results.values():
        assert end == ""
        assert same(numbers, expected)


def large_network() -> nn.Module:
    """Return a network whose update in C takes a tenth of a millisecond."""
    torch.manual_seed(1)
    return nn.Linear(600, 600)


def test_a_rank_that_is_killed_at_any_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is in the update when it is killed, the others finish the step to the bit."""
    monkeypatch.setattr(shared_weights, "_CHUNK", 1 << 18)
    expected = undisturbed("momentum", 2, in_c=True, make=large_network)
    for microseconds in range(0, 240, 40):

        def hook(weights: SharedWeights, rank: int, step: int, after: int = microseconds) -> None:
            if (rank, step) == (1, 2):
                update = weights._update_of(1)
                take = update.take

                def killed(step: int, factor: float | None) -> None:
                    signal.setitimer(signal.ITIMER_REAL, (1 + after) * 1e-6)
                    take(step, factor)
                    signal.pause()

                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process at once, whatever it runs
                update.take = killed  # type: ignore[method-assign]

        results = together("momentum", 2, hook, in_c=True, make=large_network)
        assert results[1] == -signal.SIGALRM
        numbers, _, end = results[0]
        assert (end, same(numbers, expected)) == ("", True), microseconds


def test_a_rank_that_dies_in_the_place_of_another() -> None:
    """Two ranks die one after the other in the same shard; the last one finishes all three."""

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if step != 2 or rank == 0:
            return
        if rank == 2:
            _dies(weights, "in the middle of a chunk")
            return
        update = weights._update_shard

        def of_another(shard: int, factor: float | None) -> None:
            if shard == 2:
                chunk = chunks_of(weights, 2)[1]
                chunk.update = lambda factor: _die()  # type: ignore[method-assign]
            update(shard, factor)

        weights._update_shard = of_another  # type: ignore[method-assign]

    results = together("momentum", 3, hook)
    expected = undisturbed("momentum", 3)
    assert results[2] == -signal.SIGKILL
    numbers, _, end = results[0]
    assert (end, same(numbers, expected)) == ("", True)


def test_a_rank_that_dies_before_it_has_summed() -> None:
    """The step is broken for all: the weights are those of the step before."""

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            weights.sum = _die  # type: ignore[method-assign]

    results = together("momentum", 3, hook)
    expected = undisturbed("momentum", 3, steps=1)
    assert results.pop(1) == -signal.SIGKILL
    for numbers, _, end in results.values():
        assert end == "lost in step 1"
        assert same(numbers, expected)


def test_a_rank_that_breaks_off() -> None:
    """One that has lost the others before it has summed takes all of its host along, also when it lives on."""

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if (rank, step) == (0, 1):

            def broken() -> None:
                weights.break_off()
                raise RankLost("in its sums")

            weights.sum = broken  # type: ignore[method-assign]

    results = together("momentum", 2, hook, leave_together=True)
    expected = undisturbed("momentum", 2, steps=1)
    for numbers, _, end in results.values():
        assert end == "lost in step 1"
        assert same(numbers, expected)


def test_a_rank_that_stands_still_is_killed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One that is stopped in an update could go on at any moment, so nobody does its part before it is gone."""
    monkeypatch.setattr(shared_weights, "_SILENT_S", 0.3)

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if (rank, step) == (1, 2):
            weights.update = lambda factor: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]

    results = together("momentum", 2, hook)
    expected = undisturbed("momentum", 2)
    assert results[1] == -signal.SIGKILL
    numbers, _, end = results[0]
    assert (end, same(numbers, expected)) == ("", True)
    assert "has stood still for 0 s in the middle of a step: it is killed" in capfd.readouterr().err


def test_a_rank_that_is_late_with_its_sums_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for its next images: that is no reason to kill it."""
    monkeypatch.setattr(shared_weights, "_SILENT_S", 0.05)

    def hook(weights: SharedWeights, rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            weights.sum = late(weights.sum)  # type: ignore[method-assign]

    def late(sums: Callable[[], None]) -> Callable[[], None]:
        def wait_and_sum() -> None:
            time.sleep(0.5)
            sums()

        return wait_and_sum

    for _, _, end in together("momentum", 2, hook).values():
        assert end == ""


def test_what_cannot_be_shared() -> None:
    """Other types and gaps in memory: an update by flat parts would be another one."""
    assert can_be_shared(KINDS["momentum"]([torch.zeros(3, requires_grad=True)]))
    assert not can_be_shared(KINDS["sgd"]([torch.zeros(3, dtype=torch.float64, requires_grad=True)]))
    assert not can_be_shared(KINDS["sgd"]([torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)]))
    assert not can_be_shared(KINDS["sgd"]([torch.zeros(4, 4)[:, :2].requires_grad_()]))
    assert not can_be_shared(KINDS["sgd"]([torch.zeros(3, device="meta", requires_grad=True)]))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_before_the_first_step(kind: str) -> None:
    """An optimizer that has been given its numbers takes the same steps as one that makes them itself."""
    weights = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
    optimizers = [KINDS[kind]([weight]) for weight in weights]
    give_numbers(optimizers[1], KINDS[kind])
    for step in range(3):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.full((4, 3), 0.5 + step)
            optimizer.step()
    assert torch.equal(*weights)
