"""`hvd-train valprep`: ImageNet's validation images in class folders."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from tests.unit.commands.conftest import Command

NAMES = [f"ILSVRC2012_val_{number:08}" for number in range(1, 7)]
CLASSES = dict(zip(NAMES, [f"n0{number}000000" for number in (2, 1, 2, 3, 1, 2)], strict=True))


@pytest.fixture
def flat() -> Path:
    folder = Path("data/val")
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / f"{name}.JPEG").write_text(name)
    return folder


@pytest.fixture
def devkit(flat: Path) -> None:
    data = flat.parent / "ILSVRC2012_devkit_t12/data"
    data.mkdir(parents=True)
    synsets = [(1, "n01000000", 0), (2, "n02000000", 0), (3, "n03000000", 0), (4, "n09000000", 2)]
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    savemat(data / "meta.mat", {"synsets": np.array(synsets, dtype=kind)})
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n2\n3\n1\n2\n")


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.JPEG")}


SORTED = {f"{of}/{name}.JPEG": name for name, of in CLASSES.items()}


@pytest.mark.usefixtures("devkit")
def test_the_devkit_next_to_the_images_sorts_them(flat: Path, command: Command) -> None:
    """The same command again says that it is done."""
    for says in ("data/val:", "data/val is sorted already:"):
        assert command("valprep data/val").out == f"{says} 6 images in 3 class folders\n"
        assert content(flat) == SORTED
        assert len([*flat.iterdir()]) == 3


@pytest.mark.parametrize("line", ["{0},{1} 85 1 499 272", "{0}.JPEG {1}", "mv {0}.JPEG {1}/"])
def test_other_lists_are_read(line: str, flat: Path, command: Command) -> None:
    """Kaggle's, a plain one, and the script that many have."""
    lines = ["ImageId,PredictionString", *(line.format(*each) for each in CLASSES.items())]
    Path("labels").write_text("\n".join(lines))
    command("valprep data/val --labels labels")
    assert content(flat) == SORTED


@pytest.mark.usefixtures("devkit")
def test_a_command_that_was_killed_is_finished_by_the_next(
    flat: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class folder is whole or absent, so no training takes a part of
    the images for all of them.
    """
    rename = Path.rename
    left = [0]

    def killed(path: Path, target: Path) -> Path:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    for left[0] in (0, 3, 4, 1):
        command("valprep data/val", 130)
        for folder in flat.glob("n*"):
            assert {path.stem for path in folder.iterdir()} == {
                name for name in NAMES if CLASSES[name] == folder.name
            }
    left[0] = 99
    command("valprep data/val")
    assert content(flat) == SORTED


LABELS = "".join(f"{name} {of}\n" for name, of in CLASSES.items())


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (
            f"rm data/val/{NAMES[2]}.JPEG",
            f"1 of 6 images are missing, not in the labels, or in class folders: {NAMES[2]}",
        ),
        ("touch data/val/new.JPEG", "not in the labels, or in class folders: new"),
        (
            f"mkdir data/val/n03; mv data/val/{NAMES[2]}.JPEG data/val/n03",
            f"or in class folders: {NAMES[2]}",
        ),
        ("echo cat dog > labels", "6 of 0 images are missing, not in the labels"),
        ("rm -r data/val", "data/val: No such file or directory"),
    ],
)
def test_nothing_moves_if_something_is_wrong(
    prepare: str, says: str, flat: Path, command: Command
) -> None:
    Path("labels").write_text(LABELS)
    subprocess.run(prepare, shell=True, check=True)
    before = content(flat)
    assert says in command("valprep data/val --labels labels", 2).err
    assert content(flat) == before


@pytest.mark.usefixtures("flat")
def test_a_training_names_the_command(command: Command) -> None:
    Path("data/train/n01000000").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save("data/train/n01000000/1.jpeg")
    printed = command("train imagenet-resnet50 data --device cpu", 2).err
    line = "hvd-train: data/val has no class folders: type `hvd-train valprep data/val`\n"
    assert printed == line
