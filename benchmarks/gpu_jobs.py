"""What the ranks of `benchmarks.gpu_check` run: python -m benchmarks.gpu_jobs JOB DEVICE ARGUMENTS.

A job prints one line of JSON per rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

ANSWER = "gpu-check: "
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def sums(device: str, *sizes: str) -> dict[str, Any]:
    """Return how many tensors were reduced over the ranks in groups, and which ones came out wrong."""
    tried, wrong = 0, list[str]()
    for batched in ("1", "0"):  # with and without Horovod's own kernels for copies
        os.environ["HOROVOD_BATCH_D2D_MEMCOPIES"] = batched
        hvd.init()
        n = hvd.size()
        # fp16 holds all these sums exactly, and averages if the division is exact.
        operations = {hvd.Sum: n * (n + 1) / 2, **({hvd.Average: (n + 1) / 2} if n & (n - 1) == 0 else {})}
        for size in map(int, sizes):
            for kinds in ([torch.float16], [torch.float32], [torch.float16, torch.float32]):
                for operation, factor in operations.items():
                    parts = [((torch.arange(size) + k) % 3, kind) for kind in kinds for k in range(5)]
                    group = [(part * (hvd.rank() + 1)).to(kind).to(device) for part, kind in parts]
                    name = f"{size} of {kinds}, operation {operation}, batched={batched}"
                    outputs = hvd.grouped_allreduce(group, name=name, op=operation)
                    for (part, kind), output in zip(parts, outputs, strict=True):
                        tried += 1
                        if not torch.equal(output.cpu(), (part * factor).to(kind)):
                            wrong.append(name)
        hvd.shutdown()
    return {"tried": tried, "wrong": wrong}


def busy(device: str, seconds: str) -> str:
    """Sum once to form communicators, then behind work that keeps the GPU busy for this long."""
    hvd.init()
    for number, wait in enumerate((0.0, float(seconds))):
        values = torch.full((100_003,), float(hvd.rank() + number), device=device)
        if wait and device == "cuda":
            began, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(1_000_000_000)  # clocks rise from idle
            began.record()
            torch.cuda._sleep(1_000_000_000)
            end.record()
            end.synchronize()
            for _ in range(round(1000 * wait / began.elapsed_time(end))):
                torch.cuda._sleep(1_000_000_000)
        try:
            output = hvd.allreduce(values, name=f"sum {number}", op=hvd.Sum)
        except Exception as error:  # noqa: BLE001  # the report is what matters
            return f"{type(error).__name__}: {error}"
        if output.unique().tolist() != [hvd.size() * (hvd.size() - 1) / 2 + number * hvd.size()]:
            return f"the sum is {output.unique().tolist()[:4]}"
    return "right"


def loop(device: str, kind: str, batch: int, precision: str) -> Callable[[int], Any]:
    """Return a function that takes steps of ResNet-50: `ours`, or a bare loop of `torch` or `horovod`."""
    if kind == "ours":
        return _ours(device, batch, precision)
    from torchvision import models

    torch.backends.cudnn.benchmark = True
    # Horovod refuses gradients that are not contiguous; cuDNN still computes in channels_last for such images.
    layout = torch.contiguous_format if kind == "horovod" else torch.channels_last
    model = models.resnet50().to(device, memory_format=layout)
    size = 224 if device == "cuda" else 32
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    options: dict[str, Any] = {"lr": 1e-6, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizer: Any = torch.optim.SGD(model.parameters(), fused=kind == "torch", **options)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    if kind == "horovod":
        hvd.init()
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=hvd.Compression.fp16)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def take(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if kind == "horovod":
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()

    return take


def _ours(device: str, batch: int, precision: str) -> Callable[[int], Any]:
    from hvd_train.bench import throughput
    from hvd_train.commands.train import parse_train
    from hvd_train.run import connect

    line = f"imagenet-resnet50 --data synthetic --augment none --synthetic-samples 10000000 --device {device}"
    line += f" --batch-size {batch} --precision {precision} {'' if device == 'cuda' else '--image-size 32'}"
    config = parse_train(line.split())
    training = throughput.Training(config, connect(config))

    def mark(phase: str | None) -> None:
        with torch.profiler.record_function(f"end of {phase}"):
            pass

    training._split.listener = mark
    return training.take


def bare(device: str, kind: str, batch: str, precision: str) -> float:
    """Return the median seconds of a step over three rounds."""
    take, steps = loop(device, kind, int(batch), precision), 20 if device == "cuda" else 3
    take(steps // 2)
    times = []
    for _ in range(3):
        _finish(device)
        began = time.perf_counter()
        take(steps)
        _finish(device)
        times.append((time.perf_counter() - began) / steps)
    return statistics.median(times)


def profile(device: str, kind: str, batch: str, precision: str) -> dict[str, Any]:
    """Return per step: operators (not those inside others), launches and waits of the CPU, and the GPU's idle time."""
    take, steps = loop(device, kind, int(batch), precision), 5
    take(10 if device == "cuda" else 2)
    _finish(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 1 + (device == "cuda")]) as recording:
        take(steps)
        _finish(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recording.export_chrome_trace(file.name)
        events = [one for one in json.loads(Path(file.name).read_text())["traceEvents"] if one.get("ph") == "X"]
    events.sort(key=lambda one: one["ts"])
    marks = [(one["ts"], one["name"].removeprefix("end of ")) for one in events if one["name"].startswith("end of ")]
    counts, ends = Counter[str](), dict[int, float]()
    work, idle, last = 0.0, 0.0, 0.0
    for one in events:
        name, category, began = one["name"], one.get("cat"), one["ts"]
        if category in GPU_WORK:
            idle += max(0.0, began - last) if last else 0.0
            work += max(0.0, began + one["dur"] - max(began, last))
            last = max(last, began + one["dur"])
            continue
        if category == "cpu_op" and began >= ends.get(one["tid"], 0):
            kind, ends[one["tid"]] = "operators", began + one["dur"]
        elif category in ("cuda_runtime", "cuda_driver") and ("Launch" in name or "Synchronize" in name):
            kind = "launches" if "Launch" in name else "waits"
        else:
            continue
        counts[kind] += 1
        if phase := next((phase for stamp, phase in marks if stamp >= began), None):
            counts[f"{phase} {kind}"] += 1
    per_step = {name: count / steps for name, count in sorted(counts.items())}
    return {**per_step, "gpu_busy_ms": work / 1000 / steps, "gpu_idle_ms": idle / 1000 / steps}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    job: Callable[..., Any] = {"sums": sums, "busy": busy, "bare": bare, "profile": profile}[sys.argv[1]]
    report = json.dumps(job(*sys.argv[2:]))
    os.write(1, f"{ANSWER}{report}\n".encode())  # in one piece: launchers mix the output of ranks
    os._exit(0)  # a broken Horovod may wait for ranks that are gone
