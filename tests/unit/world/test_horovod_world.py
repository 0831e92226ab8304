"""What `HorovodWorld` does beside Horovod's collectives; on real ranks tests/parallel runs the contract of a world."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.common.elastic import State, notification_manager
from torch import nn
from torch.optim import Optimizer

from hvd_train.errors import RankLost, UsageError
from hvd_train.launch import launcher
from hvd_train.world import horovod_world
from hvd_train.world.horovod_world import HorovodInternalError, HorovodWorld, hvd
from hvd_train.world.world import Place, Reduction
from tests.support.contract import PROMISES


class FourRanks(HorovodWorld):
    """Rank 1 of four, on a host with two; nobody else is there."""

    def _meet(self) -> Place:
        return Place(1, 4, 1, 2, 0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FourRanks:
    """A world without Horovod's background thread, started by nobody."""
    for name in ("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        monkeypatch.setenv(name, "set by a test")
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: False)
    return FourRanks()


@pytest.mark.parametrize(
    ("message", "line"),
    [("connection closed\nby peer", "connection closed"), ("", "a collective operation failed")],
)
def test_an_error_of_horovod_is_a_lost_rank_in_one_line(message: str, line: str) -> None:
    """The user reads the first line; the whole error is its cause."""
    with pytest.raises(RankLost) as lost, horovod_world.as_rank_lost():
        raise HorovodInternalError(message)
    assert str(lost.value) == line
    assert isinstance(lost.value.__cause__, HorovodInternalError)


def test_a_rank_that_is_lost_while_tensors_are_sent_is_a_lost_rank(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it found by a sum, by its wait, or by a hook in a backward pass."""

    def broken(*arguments: Any, **named: Any) -> int:
        raise HorovodInternalError("connection reset")

    monkeypatch.setattr(hvd, "synchronize", broken)
    monkeypatch.setattr(hvd, "grouped_allreduce_async_", broken)
    with monkeypatch.context() as until_sent:
        until_sent.setattr(hvd, "allreduce_async_", broken)
        with pytest.raises(RankLost, match="connection reset"):
            world.start_sum(torch.ones(1), "x")
    monkeypatch.setattr(hvd, "allreduce_async_", lambda tensor, name, op: 1)
    wait = world.start_sum(torch.ones(1), "x")
    with pytest.raises(RankLost, match="connection reset"):
        wait()
    with pytest.raises(RankLost, match="connection reset"):
        horovod_world._sums_by(Reduction())([torch.ones(1)], "gradients")


@pytest.mark.parametrize(
    ("reduction", "op", "before", "after"),
    [
        (Reduction(), hvd.Sum, 1.0, 1.0),
        (Reduction(predivide=8.0), hvd.Sum, 0.125, 8.0),
        (Reduction(adasum=True), hvd.Adasum, 1.0, 1.0),
    ],
)
def test_gradients_are_reduced_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, reduction: Reduction, op: Any, before: float, after: float
) -> None:
    """Summed as they are, divided before and multiplied after it, or by Adasum."""
    calls = []
    monkeypatch.setattr(hvd, "grouped_allreduce_async_", lambda tensors, **named: calls.append(named) or 7)
    assert horovod_world._sums_by(reduction)([torch.ones(1)], "gradients") == 7
    assert calls == [{"name": "gradients", "op": op, "prescale_factor": before, "postscale_factor": after}]


def test_adasum_says_what_it_needs(world: FourRanks) -> None:
    """A power of two of ranks, and MPI; before anything is wrapped."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="--reduction adasum needs MPI"):
        world.wrap(optimizer, model, Reduction(adasum=True))
    world.place = Place(0, 6)
    with pytest.raises(UsageError, match="not on 6"):
        world.wrap(optimizer, model, Reduction(adasum=True))


def test_adasum_is_for_1_2_4_8_ranks_and_alone_needs_no_mpi(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two need it already; one has nothing to reduce."""

    def fits(size: int) -> bool:
        world.place = Place(0, size)
        try:
            world._check_adasum()
        except UsageError:
            return False
        return True

    assert [size for size in range(1, 10) if fits(size)] == [1]
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: True)
    assert [size for size in range(1, 10) if fits(size)] == [1, 2, 4, 8]


def test_the_transport_is_named_with_the_one_that_coordinates_it(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build with NCCL still sums tensors of the CPU by Gloo or MPI."""
    monkeypatch.setattr(hvd, "nccl_built", lambda: True)
    assert world.transport(torch.device("cpu")) == "Gloo"
    assert world.transport(torch.device("cuda")) == "NCCL, with Gloo"
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: True)
    assert world.transport(torch.device("cuda")) == "NCCL, with MPI"
    monkeypatch.setattr(hvd, "nccl_built", lambda: False)
    assert world.transport(torch.device("cuda")) == "MPI"


def test_a_timeline_begins_and_ends_where_all_ranks_are_ready_for_it(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Horovod fails where it is asked for one that it has not prepared."""
    calls: list[str] = []
    monkeypatch.setattr(hvd, "start_timeline", calls.append)
    monkeypatch.setattr(hvd, "stop_timeline", lambda: calls.append("stop"))
    world.timeline(tmp_path)
    monkeypatch.setenv(launcher.TIMELINE, launcher.ON_DEMAND)
    world.timeline(tmp_path)
    world.timeline(None)
    assert calls == [str(tmp_path), "stop"]


def test_the_state_object_of_hvd_elastic_notes_changes_and_keeps_live_weights() -> None:
    """Two changes within a second are one wish to change, and a fault restores nothing but drops the broken step."""
    calls: list[str] = []
    state = horovod_world.ElasticState(lambda: calls.append("sync"), lambda: calls.append("forget"))
    assert isinstance(state, State)
    notification_manager.register_listener(state)
    try:
        notification_manager.handle_hosts_updated(1, None)
        notification_manager.handle_hosts_updated(1, None)
    finally:
        notification_manager.remove_listener(state)
    assert state.hosts_changed
    state.on_reset()
    assert state.hosts_changed
    state.sync()
    state.restore()
    assert calls == ["sync", "forget"]


def test_an_error_while_a_rank_prepares_is_raised_on_all(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hear of it before one of them trains, and waits for the others for ever."""
    monkeypatch.setattr(world, "gather", lambda value: [None, value, UsageError("rank 2 has no disk"), None])
    with pytest.raises(UsageError, match="rank 2 has no disk"):
        world.prepare(lambda: "built")
    monkeypatch.setattr(world, "gather", lambda value: [None] * 4)
    assert world.prepare(lambda: "built") == "built"


@pytest.mark.timeout(120)
def test_a_launched_world_of_one_keeps_the_contract() -> None:
    """All that ranks do together, by Horovod's core: the suite of launched ranks, in a process of its own."""
    place = {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    environment |= {f"HOROVOD_{name}": str(number) for name, number in place.items()}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    suite = "tests/parallel/test_world_contract.py"
    root = Path(__file__).parents[3]
    done = subprocess.run([*command, suite], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(PROMISES)} passed" in done.stdout, done.stdout


def test_mpi_is_finished_by_the_world_that_has_started_it(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod leaves it open, and Open MPI takes a process without the call for one that has failed."""
    ended: list[str] = []

    class Mpi:
        def Finalize(self) -> None:  # noqa: N802  # as mpi4py calls it
            ended.append("MPI")

    monkeypatch.setattr(horovod_world, "stop", lambda: ended.append("Horovod"))
    world.close()
    world._mpi = Mpi()
    world.close()
    assert ended == ["Horovod", "Horovod", "MPI"]


class Wrapped:
    """What `hvd.DistributedOptimizer` makes of an optimizer: another one of its class, of its groups alone."""

    backward_passes_per_step = 1

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        made: Any = type(optimizer)(optimizer.param_groups)
        self.param_groups, self.options, self.state = made.param_groups, options, made.state
        self._requires_update = {parameter for _, parameter in options["named_parameters"]}
        self.calls: list[str] = []

    def synchronize(self) -> None:
        """Note the call."""
        self.calls.append("synchronize")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Note that they are counted from here."""
        self.calls.append(f"{passes} to come")

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Note that it is left as well."""
        self.calls.append("skip")
        yield
        self.calls.append("no longer")


@pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16])
def test_an_optimizer_is_wrapped_with_what_it_has_learned(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch, wire: torch.dtype | None
) -> None:
    """Momenta come along, which Horovod forgets; only what is trained is reduced, and it is summed."""
    monkeypatch.setattr(hvd, "DistributedOptimizer", Wrapped)
    monkeypatch.setattr(horovod_world, "_SUMS_BFLOAT16", True)
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    momentum = torch.ones_like(model.weight)
    optimizer.state[model.weight]["momentum_buffer"] = momentum
    wrapped: Any = world.wrap(optimizer, model, Reduction(wire=wire))
    assert wrapped.state[model.weight]["momentum_buffer"] is momentum
    assert wrapped.options["named_parameters"] == [("weight", model.weight)]
    assert wrapped.options["op"] is hvd.Sum
    (sent,), _ = wrapped.options["compression"].compress([torch.ones(2, 2)])
    assert sent.dtype == (wire or torch.float32)


def test_what_no_wire_can_hold_travels_as_it_is(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complex parameter would lose its imaginary part in another format; Horovod says what it makes of it."""
    monkeypatch.setattr(hvd, "DistributedOptimizer", Wrapped)
    monkeypatch.setattr(horovod_world, "_SUMS_BFLOAT16", True)
    model = nn.Linear(2, 1, dtype=torch.complex64)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = world.wrap(plain, model, Reduction(wire=torch.bfloat16))
    (sent,), _ = wrapped.options["compression"].compress([torch.ones(2, 2, dtype=torch.complex64)])
    assert sent.dtype == torch.complex64


def test_a_build_without_bfloat16_says_what_to_type(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is wrapped, and so before a step; other formats work with it."""
    monkeypatch.setattr(horovod_world, "_SUMS_BFLOAT16", False)
    assert [world.can_sum(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)] == [True, True, False]
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"--compression bf16: .* type `make env` .*, or --compression fp16$"):
        world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Reduction(wire=torch.bfloat16))
    assert not world._optimizers


def test_the_installed_horovod_sums_bfloat16() -> None:
    """Where it does not, it was built before patch C17: type `make env`."""
    assert horovod_world._SUMS_BFLOAT16


def test_a_wrapped_optimizer_reduces_as_its_settings_say(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """In so many groups, each under the name of a weight in it, in the wire's format, scaled before and after."""
    sums: list[tuple[list[torch.dtype], dict[str, Any]]] = []

    def begin(tensors: list[torch.Tensor], **named: Any) -> int:
        sums.append(([tensor.dtype for tensor in tensors], named))
        return 7

    monkeypatch.setattr(hvd, "DistributedOptimizer", Wrapped)
    monkeypatch.setattr(hvd, "grouped_allreduce_async_", begin)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reduction = Reduction(wire=torch.float16, predivide=8.0, groups=2)
    wrapped: Any = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, reduction)
    wrapped._handles = {}
    with world.reduced(wrapped):
        pass
    scaled = {"op": hvd.Sum, "prescale_factor": 0.125, "postscale_factor": 8.0}
    assert sums == [([torch.float16], {"name": name, **scaled}) for name in ("1.bias", "0.bias")]
    model[0].requires_grad_(False)
    world.regroup(wrapped)
    assert wrapped._groups == [(model[1].bias, model[1].weight)]


def test_the_number_of_passes_reaches_the_optimizer_that_counts_them(world: FourRanks) -> None:
    """Its hooks send gradients after the last one."""
    told: list[int] = []
    optimizer: Any = object()
    world._optimizers[optimizer] = SimpleNamespace(expect_passes=told.append)  # type: ignore[assignment]
    world.expect_passes(optimizer, 3)
    assert told == [3]


@pytest.mark.parametrize("reduces", [False, True])
def test_a_launched_world_of_one_has_all_gradients_too(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch, reduces: bool
) -> None:
    """Horovod has no part in them there: what no pass has reached is zero, as it is on more ranks, and not None."""
    monkeypatch.setattr(hvd, "DistributedOptimizer", Wrapped)
    monkeypatch.setattr(hvd, "grouped_allreduce_async_", lambda tensors, **named: 7)
    model = nn.Linear(2, 1)
    wrapped: Any = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Reduction())
    if not reduces:
        wrapped._requires_update.clear()
    wrapped._handles = {}
    with world.reduced(wrapped):
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[0.0, 0.0]]
    assert wrapped.calls == [*(["synchronize", "1 to come"] if reduces else []), "skip", "no longer"]


@pytest.mark.parametrize(
    ("reduction", "beside"), [(Reduction(), False), (Reduction(predivide=8.0), True), (Reduction(adasum=True), True)]
)
def test_what_is_counted_is_summed_as_it_is(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch, reduction: Reduction, beside: bool
) -> None:
    """Losses and votes travel with the gradients, but not where those are scaled, or mixed by Adasum."""
    carried, sums = list[torch.Tensor](), list[str]()
    monkeypatch.setattr(world, "start_sum", lambda tensor, name: sums.append(name) or (lambda: 4 * tensor))
    optimizer: Any = object()
    world._optimizers[optimizer] = SimpleNamespace(reduction=reduction, piggyback=carried.append)  # type: ignore[assignment]
    total = world.sum_with_gradients(optimizer, torch.ones(1))()
    assert (sums, len(carried), float(total)) == ((["step"], 0, 4.0) if beside else ([], 1, 1.0))


def test_a_rank_of_a_job_that_stays_as_it_is_stops_for_all(world: FourRanks) -> None:
    """It cannot leave alone."""
    assert (world.requested(), world.requested(told_to_end=True)) == ("train", "stop")


def test_launched_ranks_come_to_one_state_before_they_train(world: FourRanks) -> None:
    """Once: they stay as they are until the end, and what the body returns is returned."""
    calls: list[str] = []
    assert world.run(lambda: calls.append("body") or "trained", lambda: calls.append("sync")) == "trained"
    assert calls == ["sync", "body"]
