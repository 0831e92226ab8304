"""`--decode gpu` on the stand-in, whose decoder has the order of torchvision's on a GPU and the pixels of a CPU's."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.fake_gpu.launch import OnGpu
from tests.integration.fake_gpu.test_training import FP32, command, on_cpu, weights
from tests.support import jpegs
from tests.support.jpegs import encoded, noise
from tests.support.launching import finished, started, wait_for
from tests.support.runs import equal

pytestmark = pytest.mark.integration

ORIENTATION, TURNED = 0x0112, 6


def mixed(root: Path, shape: tuple[int, int] | None = None) -> int:
    """Write an image of each kind for each class and split, of this shape if there is one; return how many a GPU takes.

    The CPU decodes progressive files, four colours, turned ones, PNG and files with more behind.
    """
    turned = Image.Exif()
    turned[ORIENTATION] = TURNED
    for_gpu = {
        "plain": encoded(noise(*shape or (100, 80)), quality=90),
        "tall": encoded(noise(*shape or (37, 52)), subsampling=0),
        "grey": encoded(noise(*shape or (64, 60), "L")),
    }
    for_cpu = {
        "progressive": encoded(noise(*shape or (64, 64)), progressive=True),
        "four": encoded(noise(*shape or (64, 60), "CMYK")),
        "turned": encoded(noise(*shape or (70, 60)), exif=turned),
        "not": encoded(noise(*shape or (40, 60)), "png"),
        "followed": encoded(noise(*shape or (50, 40))) + b"by other bytes",
    }
    folders = [root / split / name for split in ("train", "val") for name in ("00", "01")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (for_gpu | for_cpu).items():
            (folder / f"{name}.jpg").write_bytes(content)
    return len(folders) * len(for_gpu)


def test_images_are_those_of_the_cpu(gpu: OnGpu) -> None:
    """Crops of every kind of file differ by at most 1 of 255, and nothing is read before it is there."""
    num_files = mixed(gpu.folder / "data")
    differences, largest_group, num_decoded = gpu.played("pixels", of="decode_plays", caching=True, delay_us=3000)
    assert max(differences) <= 1.001, "to 255 and back"
    assert largest_group > 1
    epochs, a_probe = 3, 1
    assert num_decoded >= epochs * num_files + a_probe


def test_a_file_that_the_gpu_does_not_decode_is_named(gpu: OnGpu) -> None:
    """Its header is sound, the rest is not: the error is one line with this file, not with the others of its batch."""
    mixed(gpu.folder / "data")
    bad = gpu.folder / "data" / "train" / "01" / "plain.jpg"
    tables = b"\xff\xdb"  # of quantization
    bad.write_bytes(bad.read_bytes().replace(tables, b"\xff\xef"))
    error = gpu.played("damaged", of="decode_plays")
    assert error.startswith("cannot read the image data/train/01/plain.jpg: the GPU does not decode it ("), error
    assert error.endswith("); mend or remove it, or type --decode cpu"), error


def test_large_images_are_decoded_a_few_at_a_time(gpu: OnGpu) -> None:
    """What is on the device at a time is bounded by a number of pixels, not by the size of the batch."""
    folder = gpu.folder / "data"
    content = encoded(noise(2400, 1800))  # 4.3 million pixels: three of them at a time
    for path in (folder / split / "00" / f"{number}.jpg" for split in ("train", "val") for number in range(5)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    of_a_group = 3 * 3 * 2400 * 1800
    assert of_a_group <= gpu.played("memory", of="decode_plays", caching=True) < 1.1 * of_a_group


@pytest.mark.slow
def test_a_training_is_the_same_whoever_decodes(gpu: OnGpu) -> None:
    """On 2 ranks with loader processes, stopped and gone on with, weights are those of 1 rank on the CPU to the bit.

    The images are of the size to which they are resized here, where both decoders of the stand-in agree; a step is a
    sum of two parts, which has no order.
    """
    jpegs.digits(gpu.folder / "data", range(2), most=12)
    mixed(gpu.folder / "data", (jpegs.SIDE, jpegs.SIDE))
    flags = (
        *("--data", "folder", "--data-dir", "data", "--model", "tests.support.on_demand:flat", "--image-size", "28"),
        *("--augment", "none", "--global-batch-size", "6", "--batch-size", "3", "--epochs", "3", *FP32),
    )
    line = command("cuda", 2, "gpu", *flags, "--decode", "gpu", "--workers", "2")
    log = gpu.folder / "log.txt"
    with started(line, gpu.folder, log, gpu.variables()) as process:
        wait_for("the first epoch", lambda: re.search(r"epoch +1/3", log.read_text()), limit_s=120)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 128 + signal.SIGINT), log.read_text()
    code, output = finished(line, gpu.folder, variables=gpu.variables(seed=1))
    assert code == 0, output
    assert equal(weights(gpu.folder / "gpu"), on_cpu(gpu.folder, 1, *flags, "--workers", "0"))
