"""The device of a rank, its threads, memory and clock, and the loss scale."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network import device
from hvd_train.world.world import Place

CPU = torch.device("cpu")
PROGRAM = """
import resource, torch
from hvd_train import Config
from hvd_train.network.device import choose_device
from hvd_train.world.world import LocalWorld

choose_device(Config().replace(device="cpu"), LocalWorld().place)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    torch.ones(25_000_000)  # 100 MB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, False)])
def test_freed_memory_is_kept_for_the_next_step(variables: dict[str, str], kept: bool) -> None:
    """Large tensors take the places of earlier ones without a page fault each, unless the environment sets malloc."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True)
    pages = 25_000_000 * 4 // os.sysconf("SC_PAGE_SIZE")
    assert (int(done.stdout) < 20 * pages) is kept, "of forty; some find their place only after a few"


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gets the rank's share of the cores that the process may use, at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for ranks in (1, 2, 4, 8):
        assert device.choose_device(Config().replace(device="cpu"), Place(local_size=ranks)) == CPU
    assert threads == [6, 3, 1, 1]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch say that the host has two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # what `choose_device` changes is put back


def test_each_rank_of_a_host_has_a_gpu_of_its_own(gpus: None) -> None:
    """By its local rank, among all GPUs or among those that `--gpu-ids` names."""
    places = [Place(3, 4, local_rank, 2) for local_rank in range(2)]
    assert [device.choose_device(Config(), place).index for place in places] == [0, 1]
    named = Config().replace(gpu_ids=(1, 0))
    assert [device.choose_device(named, place).index for place in places] == [1, 0]
    assert device.choose_device(Config().replace(device="cpu"), places[0]).type == "cpu"


def test_gpus_that_are_not_there_are_an_error_of_use(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than ranks, one that is named and missing, or none at all; unless GPUs are asked for, the CPU will do."""
    with pytest.raises(UsageError, match="3 ranks on this host but 2 GPUs"):
        device.choose_device(Config(), Place(0, 3, 0, 3))
    with pytest.raises(UsageError, match="--gpu-ids: there is no GPU 2 on this host; they are 0 to 1"):
        device.choose_device(Config().replace(gpu_ids=(2,)), Place())
    for available, count in ((False, 2), (True, 0)):  # a driver that is too old shows GPUs that cannot be used
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert device.choose_device(Config(), Place()) == CPU
        with pytest.raises(UsageError, match="--device cuda: torch sees no GPU here"):
            device.choose_device(Config().replace(device="cuda"), Place())


def test_deterministic_gpus_repeat_themselves(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--deterministic`; else cuDNN may try what is fastest. cuBLAS needs a workspace to be named."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "earlier")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    device.choose_device(Config(), Place(1, 2, 1, 2))
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        device.choose_device(Config().replace(deterministic=True), Place())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_formats_follow_the_device_unless_they_are_chosen() -> None:
    """fp16 travels from GPUs only, and channels are last where a GPU computes with few bits."""
    gpu = torch.device("cuda", 0)
    assert [device.uses_fp16_wire(Config(), one) for one in (CPU, gpu)] == [False, True]
    assert device.uses_fp16_wire(Config().replace(compression="fp16"), CPU)
    mixed = Config().replace(precision="bf16")
    assert [device.uses_channels_last(config, gpu) for config in (Config(), mixed)] == [False, True]
    assert not device.uses_channels_last(mixed, CPU)
    assert device.uses_channels_last(Config().replace(channels_last="on"), CPU)


@pytest.mark.parametrize(("precision", "fp16_wire", "scale"), [("fp16", False, 65536.0), ("fp32", True, 1024.0)])
def test_a_rank_without_a_slot_in_the_first_step_has_a_loss_scale(
    precision: str, fp16_wire: bool, scale: float
) -> None:
    """It divides the gradients of the other ranks by the scale, though it has scaled no loss itself."""
    scaler = device.loss_scaler(Config().replace(precision=precision), CPU, fp16_wire=fp16_wire)
    assert scaler.get_scale() == scale
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 3.0 * scale)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-3.0, -3.0]
    assert not device.loss_scaler(Config(), CPU, fp16_wire=False).is_enabled()


def test_phases_on_a_gpu_are_timed_in_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stamp is an event among the queued work, which is waited for only when the time is asked for."""
    recorded = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.known = not enable_timing

        def record(self) -> None:
            recorded.append(self)

        def synchronize(self) -> None:
            self.known = True

        def elapsed_time(self, end: Event) -> float:
            assert end.known
            return 500.0 * (recorded.index(end) - recorded.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    split = device.split_on(torch.device("cuda", 0))
    for phase in ("data", "forward", "forward", "optimizer"):
        split.mark(phase)
    spent = split.take()
    assert spent is not None
    phases = {"data": 0.5, "forward": 1.0, "optimizer": 0.5}
    assert {phase: seconds for phase, seconds in spent.items() if seconds} == phases
