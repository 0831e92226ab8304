"""Whether a training on GPUs is that of a CPU: the digits for three steps of 480 images, in every way they can go.

Numbers in other orders of addition round otherwise, so weights are equal within a bound from arithmetic. `difference`
is the distance of the weights from those of the CPU, divided by the way that training has moved them. A gradient is a
sum over the images and the places in them; each addition may be wrong by the unit roundoff, in each step. Mixed
precision also rounds in each layer of the forward and the backward pass, and more coarsely. A rank whose gradients are
not summed, or are summed twice, moves the weights by a good part of the whole way.

That all ranks end with the same bits is what the trainer itself checks: it compares digests before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.findings import Failed, Finding, NotApplicable, Seen, checked
from benchmarks.gpu_check.site import PROGRAMS, Site
from benchmarks.input import photograph

STEPS, BATCH, PLACES, LAYERS = 3, 480, 8 * 8, 5
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
ADDITIONS = STEPS * BATCH * PLACES  # on the way of a weight from the first to the last step
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # cuDNN would take its convolutions of fp32 for such of 10 bits
DIGITS = f"digits --epochs 1 --global-batch-size {BATCH} --augment none --compression none --learning-rate 0.1".split()
NETWORKS = "benchmarks.gpu_check.networks"
FOLDER = f"--data folder --data-dir images --model {NETWORKS}:flat --image-size 32 --global-batch-size 16".split()
FIXED = ["--learning-rate", "1e-30", "--weight-decay", "0"]  # weights stay where they begin
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """A way to train the digits, beside plain fp32."""

    name: str
    flags: tuple[str, ...]
    precision: str = "fp32"
    compiles: bool = False


WAYS = (
    Way("channels last", ("--channels-last", "on")),
    Way("accumulation", ("--batch-size", "8")),
    Way("torch.compile", ("--compile",), compiles=True),
    Way("fp16", ("--precision", "fp16", "--compression", "auto"), "fp16"),
    Way("bf16", ("--precision", "bf16"), "bf16"),
    Way("gradients as bf16", ("--compression", "bf16"), "bf16"),
)


def checks(site: Site) -> Iterator[Finding]:
    """Train in every way, and compare the weights."""
    training = Training(site)
    yield checked("CPU", training.on_cpu)
    yield checked("CUDA, alone", partial(training.compared, "alone", 1))
    for ranks in [ranks for ranks in site.worlds() if ranks > 1]:
        yield checked(f"CUDA, {ranks} ranks", partial(training.compared, f"ranks-{ranks}", ranks))
    yield checked("deterministic", training.twice)
    if not site.short:
        for way in WAYS:
            yield checked(way.name, partial(training.in_a_way, way))
        yield checked("sync batch norm", training.normalised)
        yield checked("JPEG folders", training.from_files)


class Training:
    """Trainings in the folder of the check, and the weights that they end with."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.few = 1 if site.short else site.worlds()[0]  # ranks of trainings for which their number does not matter

    def on_cpu(self) -> Seen:
        """Train on the CPU: the measure of all others."""
        self.trained("cpu", "cpu", 1, *DIGITS)
        return f"{STEPS} steps, {ADDITIONS} additions for a weight", {}

    def compared(self, name: str, ranks: int, *flags: str) -> Seen:
        """Train on GPUs and compare with the CPU."""
        return self._beside("cpu", self.trained(name, "cuda", ranks, *DIGITS, *flags), DIGITS, "fp32")

    def in_a_way(self, way: Way) -> Seen:
        """Train in this way on GPUs and compare with plain fp32 on the CPU."""
        if way.compiles and self.site.machine.is_stand_in:
            raise NotApplicable("the stand-in has no compiler")
        weights = self.trained(way.name.replace(" ", "-"), "cuda", self.few, *DIGITS, *way.flags)
        return self._beside("cpu", weights, DIGITS, way.precision)

    def normalised(self) -> Seen:
        """Train with batch norm over the samples of all ranks, each of which takes its part in one pass."""
        line = [*DIGITS, "--model", f"{NETWORKS}:normalised", "--sync-batch-norm"]
        self.trained("norm-cpu", "cpu", 1, *line, "--batch-size", str(BATCH))
        weights = self.trained("norm", "cuda", self.few, *line, "--batch-size", str(BATCH // self.few))
        return self._beside("norm-cpu", weights, line, "fp32")

    def twice(self) -> Seen:
        """Train twice with --deterministic: not a bit may differ."""
        flags = ("--deterministic", "--precision", "fp16", "--compression", "auto")
        first, second = (self.trained(name, "cuda", self.few, *DIGITS, *flags) for name in ("once", "twice"))
        if differ := [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]:
            raise Failed(f"two trainings differ in {', '.join(differ[:4])}")
        return "two trainings in fp16 have the same bits", {}

    def from_files(self) -> Seen:
        """Train from JPEG files in class folders."""
        images(self.site.folder / "images")
        line = [*DIGITS, *FOLDER]
        self.trained("folder-cpu", "cpu", 1, *line)
        return self._beside("folder-cpu", self.trained("folder", "cuda", self.few, *line), line, "fp32")

    def trained(self, name: str, device: str, ranks: int, *flags: str) -> Weights:
        """Train, and return the weights at the end."""
        command = [str(PROGRAMS / "hvd-train"), "train", *flags, "--device", device, "--output-dir", name]
        line = self.site.launched(ranks, *command) if ranks > 1 else command
        self.site.run(name, line, limit_s=240, **NO_TF32)
        return self._weights(name)

    def _weights(self, name: str) -> Weights:
        path = self.site.folder / name / "model-final.pt"
        if not path.exists():
            raise NotApplicable(f"the training to compare with, {name}, has not ended")
        return {
            name: tensor.double()
            for name, tensor in torch.load(path, map_location="cpu", weights_only=True).items()
            if tensor.is_floating_point() and "running_" not in name
        }

    def _beside(self, reference: str, weights: Weights, line: list[str], precision: str) -> Seen:
        """Compare weights with those of a training on the CPU, of which `line` are the flags."""
        right = self._weights(reference)
        begin = f"{reference}-begin"
        if not (self.site.folder / begin / "model-final.pt").exists():
            self.trained(begin, "cpu", 1, *line, *FIXED)
        moved = distance(right, self._weights(begin))
        difference = distance(weights, right) / moved
        rounding = ROUNDING["fp32"] * ADDITIONS
        bound = rounding if precision == "fp32" else rounding + STEPS * 2 * LAYERS * ROUNDING[precision]
        figures = {"difference": difference, "bound": bound}
        seen = f"difference {difference:.1e}, at most {bound:.1e}"
        if not difference <= bound:  # as it is with NaN
            raise Failed(seen, **figures)
        return f"{seen}; equal on all ranks", figures


def distance(one: Weights, other: Weights) -> float:
    """Return the Euclidean distance of two sets of weights."""
    return math.sqrt(sum(float(((one[name] - other[name]) ** 2).sum()) for name in one))


def images(root: Path) -> None:
    """Write a few small JPEG files in two classes, for training and for validation."""
    generator = np.random.default_rng(0)
    for number in range(48):
        folder = root / ("val" if number % 6 > 3 else "train") / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        photograph(generator, 48, 64).save(folder / f"{number:02}.jpg", quality=90)
