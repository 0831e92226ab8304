"""The device of a rank and its threads."""

import os
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hvd_train import recipes
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network import device
from hvd_train.world.world import Place
from tests.support.worlds import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # undo what `choose_device` sets


def choose(rank: int = 0, ranks: int = 1, **changes: object) -> torch.device:
    """Choose the device of a rank of several on one host."""
    return device.choose_device(Config().replace(**changes), Place(rank, ranks, rank, ranks))


def test_each_rank_has_its_own_gpu_unless_nccl_shares_them(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [choose(rank, 2).index for rank in range(2)] == [0, 1]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [choose(rank, 3).index for rank in range(3)] == [0, 1, 0]
    assert choose(device="cpu") == CPU


def test_missing_gpus_are_an_error_of_use(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="3 ranks on this host but 2 GPUs"):
        choose(0, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose() == CPU


def test_gpus_that_torch_cannot_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on GPUs whose driver is too old must not train on CPUs without a word."""

    def is_available():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old. Please update",
            stacklevel=2,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(
        UsageError, match="The NVIDIA driver on your system is too old: type `hvd-train doctor`"
    ):
        choose()
    assert choose(device="cpu") == CPU


def test_each_rank_may_see_one_gpu_that_no_other_has(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's --gpus-per-task shows each task its own. Two ranks with the same GPU are refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match="2 ranks on this host but 1 GPUs"):
        choose(1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    chosen = choose(1, 2)
    assert chosen.index == 0
    uuids = {"rank-0": 7, "rank-1": 8}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(uuid=uuids[threading.current_thread().name]),
    )
    run_ranks(2, lambda world: device.check_own_gpus(world, chosen))
    uuids["rank-1"] = 7
    with pytest.raises(UsageError, match="ranks 0 and 1 have the same GPU of"):
        run_ranks(2, lambda world: device.check_own_gpus(world, chosen))


def test_ranks_share_the_cores_that_are_not_bound_to_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    place = Place(0, 4, 0, 4)
    assert device.num_cores(place) == 3
    # Slurm has not bound the task to its cores; it has
    for cpus_per_task, cores in (("3", 3), ("12", 12)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus_per_task)
        assert device.num_cores(place) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # the task is torchrun
    assert device.num_cores(place) == 3


@pytest.mark.parametrize(
    ("typed", "number"), [(None, 5), ("OMP_NUM_THREADS", 2), ("MKL_NUM_THREADS", 2)]
)
def test_a_number_of_threads_of_the_user_holds(
    typed: str | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads these variables when it is imported."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if typed is not None:
        monkeypatch.setenv(typed, "2")
    torch.set_num_threads(2)
    choose()
    assert torch.get_num_threads() == number


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_in_fp32_without_loss_scale_on_cpus(name: str) -> None:
    """The arithmetic of half precision is for GPUs, also in a trial."""
    for config in (recipes.get(name), recipes.trial(recipes.get(name))):
        assert device.arithmetic(config, CPU) == "fp32"
        assert device.wire_format(config, CPU) == "none"
        assert not device.loss_scaler(config, CPU).is_enabled()


def test_imagenet_recipes_are_in_fp16_on_gpus() -> None:
    gpu = torch.device("cuda", 0)
    for name in ("imagenet-resnet50", "imagenet-resnet50-modern", "cifar10-resnet18-transfer"):
        config = recipes.get(name)
        assert device.arithmetic(config, gpu) == device.wire_format(config, gpu) == "fp16"
        assert device.uses_channels_last(config, gpu)


@pytest.mark.parametrize(
    ("model", "layer", "module", "function"),
    [
        (nn.Conv2d(1, 1, 1), "convolution", torch, "conv2d"),
        (nn.Linear(1, 1), "linear layer", nn.functional, "linear"),
    ],
)
def test_half_precision_that_the_user_typed_is_noted_if_it_is_slow_on_this_cpu(
    model: nn.Module, layer: str, module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a layer of the model takes ten times as long as in fp32; the setting holds."""
    config = Config().replace(precision="bf16")
    clock = SimpleNamespace(now=0.0, half_s=9.0)  # fp32 takes one second
    original = getattr(module, function)

    def timed(*tensors):
        clock.now += clock.half_s if torch.is_autocast_enabled("cpu") else 1.0
        return original(*tensors)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(module, function, timed)
    assert device.notes_on_arithmetic(config, CPU, model) == []
    clock.half_s = 25.0
    [note] = device.notes_on_arithmetic(config, CPU, model)
    assert f"--precision bf16: a {layer} takes 25 times as long as in fp32" in note
    assert device.arithmetic(config, CPU) == "bf16"


def test_the_load_of_a_gpu_is_read_as_far_as_the_driver_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without nvidia-ml-py torch raises errors. No error ends a training."""
    missing = Mock(side_effect=ModuleNotFoundError("nvidia-ml-py does not seem to be installed"))
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: 30 * 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 87)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 412_000)
    assert device.gpu_load(gpu) == {"memory_gib": 30.0, "utilization": 0.87, "power_w": 412.0}
    for name in ("utilization", "power_draw"):
        monkeypatch.setattr(torch.cuda, name, missing)
    assert device.gpu_load(gpu) == {"memory_gib": 30.0}
    assert device.gpu_load(CPU) == {}


def test_deterministic_gpus_repeat_themselves(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "earlier")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        choose(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
