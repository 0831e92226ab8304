"""How fast a step is: beside a bare torch loop and a bare Horovod loop, and where its time goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.findings import Failed, Finding, NotApplicable, Seen, checked
from benchmarks.gpu_check.site import PROGRAMS, Site
from benchmarks.speed import AIM_ON_GPU, OnGpu, Peer, Series, measure, on_gpus

TURNS, TURN_S = 5, 2.0
STEP = ["imagenet-resnet50", "--device", "cuda", "--precision", "fp16"]
HVD_TRAIN = str(PROGRAMS / "hvd-train")


def checks(site: Site) -> Iterator[Finding]:
    """Compare with the bare loops, measure the step, and trace some."""
    for series in all_series(site):
        yield checked(series.name, partial(beside, site, series))
    if not site.short:
        for ranks in sorted({1, site.machine.most_ranks}):
            name = f"bench throughput, {ranks} rank{'s' * (ranks > 1)}"
            yield checked(name, partial(throughput, site, ranks))
        yield checked("profile", partial(profile, site))


def all_series(site: Site) -> list[Series]:
    """Return what is compared: both bare loops, in small where the stage is only tried."""
    if not site.short:
        return on_gpus(1 if site.machine.shares_gpu else len(site.machine.gpus))
    small = dataclasses.replace(on_gpus(1)[0], network="small", gpu=OnGpu(8, image_size=16))
    return [small, dataclasses.replace(small, launcher="gloo", peers=(Peer("horovod-expert", "gloo", AIM_ON_GPU),))]


def beside(site: Site, series: Series) -> Seen:
    """Compare our loop with another; on the stand-in no speed is too low."""
    if series.gpu and series.gpu.compiled and site.machine.is_stand_in:
        raise NotApplicable("the stand-in has no compiler")
    site.seconds_left()
    turns, seconds = (1, 0.1) if site.short else (TURNS, TURN_S)
    try:
        result = measure(series, 1, turns, seconds)
    except SystemExit as error:  # a program has not come to its end, and what it has printed is in the error
        raise reason_of(str(error)) from None
    [(other, ratio)] = result["beside"].items()
    low, high = ratio["interval"]
    times = result["seconds_per_step"]
    seen = f"{ratio['median']:.3f} ({low:.3f} to {high:.3f}) of its images/s"
    seen += f"; {times['ours'] * 1000:.1f} and {times[other] * 1000:.1f} ms a step"
    if site.machine.is_stand_in:
        return f"both train; of no meaning on the stand-in: {seen}", result
    if ratio["verdict"] == "not met":
        raise Failed(f"{seen}, {ratio['aim']}", **result)
    return seen, result


def reason_of(output: str) -> Exception:
    """Return what stands for a program that has not come to its end: too large a batch is no fault."""
    lines = [line for line in output.splitlines() if "Error" in line] or output.splitlines()
    if any("out of memory" in line.lower() for line in lines):
        return NotApplicable("the batch does not fit into the memory of this GPU")
    return Failed(lines[-1][-300:] if lines else "no end, and no word of why")


def throughput(site: Site, ranks: int) -> Seen:
    """Measure the step with the project's own tool, and say where its time goes."""
    batch = "32" if site.machine.shares_gpu and ranks > 1 else "208"
    command = [HVD_TRAIN, "bench", "throughput", *STEP, "--batch-size", batch]
    record = site.measured(f"throughput-{ranks}", site.launched(ranks, *command) if ranks > 1 else command)
    split = ", ".join(f"{name} {seconds * 1000:.1f}" for name, seconds in record["split"].items())
    kept = ("images_per_second", "images_per_second_interval", "seconds_per_step", "split", "controller", "device")
    return f"{record['images_per_second']:.0f} images/s; in ms: {split}", {name: record[name] for name in kept}


def profile(site: Site) -> Seen:
    """Trace ten steps: the file is what a reader looks at for idle time between the last sum and the next forward."""
    if site.machine.is_stand_in:
        raise NotApplicable("the profiler does not see the device of the stand-in")
    ranks, batch = site.worlds()[0], 64
    data = ["--data", "synthetic", "--synthetic-samples", str(40 * ranks * batch), "--batch-size", str(batch)]
    command = [HVD_TRAIN, "train", *STEP, *data, "--epochs", "1", "--profile", "20:29", "--output-dir", "profiled"]
    output = site.run("profile", site.launched(ranks, *command) if ranks > 1 else command)
    files = sorted((site.folder / "profiled" / "profile").glob("*.json.gz"))
    if not files:
        raise Failed("no trace was written")
    return f"{files[0]}, for https://ui.perfetto.dev", {"summary": output.splitlines()[-40:]}
