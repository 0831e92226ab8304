"""The device of a rank and its threads."""

import os

import pytest
import torch

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network import device
from hvd_train.world.world import Place

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # undo what `choose_device` sets


def test_each_rank_has_its_own_gpu_unless_nccl_shares_them(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(3, 4, local_rank, 2) for local_rank in range(2)]
    assert [device.choose_device(Config(), place).index for place in places] == [0, 1]
    named = Config().replace(gpu_ids=(1, 0))
    assert [device.choose_device(named, place).index for place in places] == [1, 0]
    assert device.choose_device(Config().replace(device="cpu"), places[0]).type == "cpu"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    devices = [device.choose_device(Config(), Place(rank, 3, rank, 3)) for rank in range(3)]
    assert [one.index for one in devices] == [0, 1, 0]


def test_missing_gpus_are_an_error_of_use(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="3 ranks on this host but 2 GPUs"):
        device.choose_device(Config(), Place(0, 3, 0, 3))
    for available, count in ((False, 2), (True, 0)):  # a driver that is too old shows GPUs that cannot be used
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert device.choose_device(Config(), Place()) == CPU
        with pytest.raises(UsageError, match="--device cuda: torch sees no GPU here"):
            device.choose_device(Config().replace(device="cuda"), Place())


def test_deterministic_gpus_repeat_themselves(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "earlier")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        device.choose_device(Config().replace(deterministic=True), Place())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
