"""Whether images come as fast as a GPU takes them: from JPEG files of the size of photographs, made here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.gpu_check.findings import Finding, Seen, checked
from benchmarks.gpu_check.site import PROGRAMS, Site
from benchmarks.input import photograph

HEIGHT, WIDTH, CLASSES = 375, 500, 4
FILES, DIFFERENT = 20_000, 400  # about 2 GB
HVD_TRAIN = str(PROGRAMS / "hvd-train")


def checks(site: Site) -> Iterator[Finding]:
    """Make the files, then measure the input alone and with the model."""
    yield checked("files", partial(files, site))
    cores = len(os.sched_getaffinity(0))
    for workers in (1,) if site.short else sorted({min(workers, cores) for workers in (4, 8, 16)}):
        yield checked(f"bench input, {workers} processes", partial(alone, site, workers))
    yield checked("bench input, decoded by the GPU", partial(alone, site, min(4, cores), "gpu"))
    if not site.short:
        yield checked("with the model", partial(with_model, site, min(16, cores)))


def files(site: Site) -> Seen:
    """Write JPEG files in class folders; most of them are copies, since making one takes longer than reading it."""
    root = site.folder / "photographs"
    count, different, scale = (16, 8, 5) if site.short else (FILES, DIFFERENT, 1)
    for split in ("train", "val"):
        for number in range(CLASSES):
            (root / split / str(number)).mkdir(parents=True, exist_ok=True)
    first = [root / "train" / str(number % CLASSES) / f"{number:05}.jpg" for number in range(different)]
    if site.short:
        for path in first:
            write(path, scale)
    else:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            list(pool.map(write, first, [scale] * different, chunksize=8))
    for number in range(different, count):
        shutil.copyfile(first[number % different], root / "train" / str(number % CLASSES) / f"{number:05}.jpg")
    for path in first[:CLASSES]:
        shutil.copyfile(path, root / "val" / path.parent.name / path.name)
    size = sum(path.stat().st_size for path in first) / different
    return f"{count} files of {size / 1000:.0f} KB", {"files": count, "bytes_of_a_file": round(size)}


def write(path: Path, scale: int) -> None:
    """Write one file, smaller by `scale` in both directions."""
    generator = np.random.default_rng(int(path.stem))
    photograph(generator, HEIGHT // scale, WIDTH // scale).save(path, quality=90)


def flags(site: Site, workers: int) -> list[str]:
    """Return the flags of a training from these files."""
    batch = "8" if site.short else "208"
    data = ["--data", "folder", "--data-dir", "photographs", "--workers", str(workers), "--batch-size", batch]
    return [*(["digits", "--image-size", "32"] if site.short else ["imagenet-resnet50"]), "--device", "cuda", *data]


def alone(site: Site, workers: int, decode: str = "cpu") -> Seen:
    """Measure the input without a model."""
    times = ["--seconds", "1", "--repetitions", "1"] if site.short else ["--seconds", "3", "--repetitions", "3"]
    command = [HVD_TRAIN, "bench", "input", *flags(site, workers), "--decode", decode, *times]
    record = site.measured(f"input-{workers}-{decode}", command, limit_s=180)
    kept = ("images_per_second", "images_per_second_per_process", "limited_by", "stages", "cores_for_a_gpu")
    figures = {name: record[name] for name in kept if name in record}
    return f"{record['images_per_second']:.0f} images/s, limited by {record['limited_by']}", figures


def with_model(site: Site, workers: int) -> Seen:
    """Measure the step with these files, beside the step with images that are on the device already."""
    model = ["--precision", "fp16"]
    command = [HVD_TRAIN, "bench", "throughput", *flags(site, workers), *model]
    from_files = site.measured("from-files", command)["images_per_second"]
    plain = [HVD_TRAIN, "bench", "throughput", "imagenet-resnet50", "--device", "cuda", "--batch-size", "208", *model]
    on_device = site.measured("on-device", plain)["images_per_second"]
    figures = {"from_files": from_files, "on_device": on_device}
    return f"{from_files:.0f} images/s from files, {on_device:.0f} without", figures
