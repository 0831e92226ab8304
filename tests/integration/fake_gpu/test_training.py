"""Trainings on the stand-in end with bit-identical weights to trainings on CPUs."""

import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_counts import counted
from tests.fake_gpu.launch import OnGpu
from tests.support import jpegs
from tests.support.launching import HVD_TRAIN, PROJECT, launch_line, output_of
from tests.support.runs import Weights, equal

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FP32 = ("--compression", "none")
FP16_WIRE = ("--compression", "fp16")
FOLDER = (
    "--data folder --data-dir data --model tests.support.on_demand:flat --image-size 32 "
    "--global-batch-size 12 --batch-size 3 --workers 2"
)


def command(device: str, ranks: int, folder: str, *flags: str) -> list[str]:
    """Return a training of the digits recipe on a device, which writes to `folder`."""
    line = f"train digits --device {device} --epochs 1 --output-dir {folder}".split()
    line += ["--channels-last", "off"]  # as in fp32 on a GPU
    line = launch_line("gloo" if ranks > 1 else "none", ranks, HVD_TRAIN, *line, *flags)
    # The number of threads changes the order of sums inside an operator; the stand-in takes one.
    return line if device == "cuda" else ["taskset", "-c", str(min(os.sched_getaffinity(0))), *line]


def weights(folder: Path) -> Weights:
    return torch.load(folder / "model-final.pt", map_location="cpu", weights_only=True)


def on_cpu(folder: Path, ranks: int, *flags: str) -> Weights:
    variables = {"PYTHONPATH": str(PROJECT)}
    output_of(command("cpu", ranks, "cpu", *flags), folder, variables=variables)
    return weights(folder / "cpu")


def on_gpu(gpu: OnGpu, ranks: int, *flags: str, **settings: object) -> Weights:
    output = output_of(
        command("cuda", ranks, "gpu", *flags), gpu.folder, variables=gpu.variables(**settings)
    )
    assert f"{ranks} rank{'s' if ranks > 1 else ''} on cuda" in output
    return weights(gpu.folder / "gpu")


@pytest.mark.parametrize(
    ("ranks", "flags", "settings"),
    [
        pytest.param(2, FP32, {}, id="two ranks over NCCL"),
        pytest.param(3, ("--compression", "bf16"), {}, id="three ranks with the bf16 wire"),
        pytest.param(3, ("--reduction", "exact"), {"delay_us": 3000}, id="three ranks, exact sums"),
        pytest.param(2, FP16_WIRE, {"seed": 0, "delay_us": 3000}, id="late streams"),
    ],
)
def test_weights_are_those_of_cpus(
    gpu: OnGpu, ranks: int, flags: tuple[str, ...], settings: dict[str, int]
) -> None:
    """With NCCL as with Gloo; late work shows no race.

    `make gpu-check` compares other settings on a real GPU.
    """
    assert equal(on_gpu(gpu, ranks, *flags, **settings), on_cpu(gpu.folder, ranks, *flags))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_clip_within_the_optimizer_differs_by_rounding_alone(gpu: OnGpu, optimizer: str) -> None:
    """On a GPU the optimizer unscales and clips, after its first step; on CPUs we do it before."""
    three_steps = ("--global-batch-size", "480", "--optimizer", optimizer)
    no_step = ("--learning-rate", "1e-30", "--weight-decay", "0")
    start = on_cpu(gpu.folder, 1, *three_steps, *no_step)
    (gpu.folder / "cpu").rename(gpu.folder / "start")
    flags = (*FP16_WIRE, *three_steps, "--clip-norm", "0.1")
    there, here, begin = (
        torch.cat([each.double().flatten() for each in found.values()])
        for found in (on_gpu(gpu, 1, *flags), on_cpu(gpu.folder, 1, *flags), start)
    )
    difference = float((there - here).norm() / (begin - here).norm())
    # a few roundings of each number a step, which later steps amplify
    assert 0 < difference <= 1e-4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_is_the_same_however_late_streams_are(gpu: OnGpu, precision: str) -> None:
    """Mixed precision is bit-identical, skipped steps included; CPUs
    have other operators for it.
    """
    flags = ("--precision", precision)
    prompt = on_gpu(gpu, 2, *flags, delay_us=0)
    (gpu.folder / "gpu").rename(gpu.folder / "prompt")
    assert equal(on_gpu(gpu, 2, *flags, seed=1, delay_us=3000), prompt)


def test_pictures_come_through_pinned_memory(gpu: OnGpu) -> None:
    """Late copies to the device do not see the next batch."""
    jpegs.digits(gpu.folder / "data", range(3), most=16)
    flags = [*FP32, *FOLDER.split()]
    assert equal(on_gpu(gpu, 2, *flags, delay_us=3000), on_cpu(gpu.folder, 2, *flags))


OFFLOADED = """
import copy, os, signal, sys
import torch
import torch.nn.functional as F
import hvd_train

class Offloaded(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            copied = self.state[parameter].setdefault("copied", parameter.detach().cpu())
            assert copied.device.type == "cpu"
            assert self.state[parameter].get("momentum_buffer", parameter).device == parameter.device
        super().step(closure)

_, config = hvd_train.parse_args(epochs=2, global_batch_size=32, batch_size=8, workers=0)
model = torch.nn.Linear(8, 3)
optimizer = Offloaded(model.parameters(), lr=0.1, momentum=0.9)
data = [(torch.cos(torch.arange(8.0) * n), n % 3) for n in range(96)]
with hvd_train.Session(model, optimizer, data, config=config) as session:
    here = session.device
    centre = torch.zeros(3, device=here)
    own = session.register(slow=copy.deepcopy(model), centre=centre, queue=[], count=torch.zeros(1))
    for epoch in session.epochs():
        for step in epoch:
            for micro in step:
                micro.backward(F.cross_entropy(model(micro.batch[0]) - own.centre, micro.batch[1], reduction="none"))
            assert all(each.device == here for each in (own.centre, own.slow.weight, *own.queue))
            assert own.count.device.type == "cpu"
            with torch.no_grad():
                own.slow.weight.lerp_(model.weight, 0.1)
                own.centre = own.centre * 0.9 + model.bias * 0.1
            own.queue = [*own.queue, own.centre][-2:]
            if step.number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
"""  # noqa: E501


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_registered_returns_to_its_device(gpu: OnGpu, ranks: int) -> None:
    """Each rank has a GPU of its own, which is no difference between
    them; a CPU tensor stays one.
    """
    (gpu.folder / "offloaded.py").write_text(OFFLOADED)
    line = [sys.executable, *["offloaded.py", "--device", "cuda", "--output-dir", "run"]]
    line = launch_line("gloo" if ranks > 1 else "none", ranks, *line)
    output_of(line, gpu.folder, code=143, variables=gpu.variables())
    assert "done" in output_of(line, gpu.folder, variables=gpu.variables())


@pytest.mark.parametrize(("ranks", "launches", "megabytes"), [(1, 42, 725), (2, 52, 1035)])
def test_a_step_asks_little_of_a_gpu(
    libraries: Path, tmp_path: Path, ranks: int, launches: int, megabytes: int
) -> None:
    """In a step of ResNet-50 our code keeps to limits: launches, what they read and write, copies
    from and to the host; and the host waits once.
    """
    for precision, found in counted(tmp_path, ranks).items():
        # in fp32 the input takes three more, to round as on a CPU
        limits = {
            "own launches": launches + 3 * (precision == "fp32"),
            "own MB": megabytes,
            "copies": 2,
            "waits": 1,
        }
        above = {kind: found[kind] for kind, limit in limits.items() if found[kind] > limit}
        assert not above, f"{precision}: above {limits}"


def test_the_checks_for_real_gpus_run(gpu: OnGpu) -> None:
    """The sums of `make gpu-check` are exact; its other stages take minutes."""
    line = [sys.executable, *["-m", "tests.gpu_check", "--quick", "--stages", "sums"]]
    output = output_of(line, gpu.folder, variables=gpu.variables())
    assert output.count("exact on every rank") == 8
