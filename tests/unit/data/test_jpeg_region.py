"""The decoder of JPEG parts reads and writes only its own memory; `make fuzz` looks further than these seeds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from hvd_train.data.pictures import UNREADABLE, Picture
from tests.support import fuzz
from tests.support.jpegs import whole

DECODER = (fuzz.SOURCE.parent / "../../hvd_train/data/jpeg_region.c").resolve()


def test_seeds_are_decoded_in_bounds(tmp_path: Path) -> None:
    """No sanitizer objects to files that are cut off, contradict themselves or claim what is not there."""
    done = fuzz.run(fuzz.built(tmp_path), seconds=0)
    assert (done.returncode, done.stdout) == (0, f"{len(fuzz.SEEDS)} inputs\n"), done.stderr
    assert len(fuzz.SEEDS) >= 20


@pytest.mark.parametrize(
    ("name", "sound", "faulty"),
    [
        ("jpeg_region.c", "calloc(1 + num + WIDE / 4", "calloc(num"),
        ("jpeg_region.c", "malloc((num + WIDE / 4) * 8)", "malloc(num * 8)"),
        ("jpeg_region.c", "(size_t)place * length", "(size_t)(place + 1) * length"),
        ("jpeg_region.c", "    free(r->row);\n", ""),
        ("jpeg_resize.h", "    free(all);\n    return a->weights != 0;", "    return a->weights != 0;"),
        ("jpeg_resize.h", "calloc((size_t)size * (size_t)a->num_weights", "calloc((size_t)size"),
        ("jpeg_huffman.h", "if (b->stop - b->at >= 8)", ""),
        ("jpeg_huffman.h", "b->at == b->stop || ", ""),
    ],
)
def test_a_fault_would_be_found(name: str, sound: str, faulty: str, tmp_path: Path) -> None:
    """Memory that is too short, read or written beside its place, or not freed ends the seeds' run."""
    for part in DECODER.parent.glob("jpeg_*.[ch]"):
        shutil.copy(part, tmp_path)
    text = (tmp_path / name).read_text()
    assert sound in text
    (tmp_path / name).write_text(text.replace(sound, faulty))
    driver = fuzz.SOURCE.read_text().replace("../../hvd_train/data/jpeg_region.c", "jpeg_region.c")
    (tmp_path / "fuzz_jpeg.c").write_text(driver)
    done = fuzz.run(fuzz.built(tmp_path, tmp_path / "fuzz_jpeg.c"), seconds=0)
    assert done.returncode != 0
    assert "Sanitizer" in done.stderr
    assert (tmp_path / "found.jpg").exists()


@pytest.mark.parametrize("seed", fuzz.SEEDS, ids=lambda path: path.stem)
def test_a_seed_is_unreadable_or_as_pillow_shows_it(seed: Path) -> None:
    """Each seed leads to an error that names what is wrong, or to the pixels that Pillow decodes."""
    data = seed.read_bytes()
    try:
        picture = Picture(data)
        part = picture.part(0, 0, picture.width, picture.height)
    except UNREADABLE:
        with pytest.raises((*UNREADABLE, Image.DecompressionBombError)):
            whole(data)
    else:
        assert torch.equal(part, whole(data))
