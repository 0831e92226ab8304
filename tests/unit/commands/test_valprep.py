"""`hvd-train valprep`: ImageNet's validation images in class folders."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from hvd_train import cli

NAMES = [f"ILSVRC2012_val_{number:08}" for number in range(1, 7)]
CLASSES = dict(zip(NAMES, ["n02", "n01", "n02", "n03", "n01", "n02"], strict=True))
CLASSES = {name: f"{short}000000" for name, short in CLASSES.items()}


@pytest.fixture
def flat() -> Path:
    folder = Path("data/val")
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / f"{name}.JPEG").write_text(name)
    return folder


def devkit() -> None:
    data = Path("data/ILSVRC2012_devkit_t12/data")
    data.mkdir(parents=True)
    synsets = [(1, "n01000000", 0), (2, "n02000000", 0), (3, "n03000000", 0), (4, "n09000000", 2)]
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    savemat(data / "meta.mat", {"synsets": np.array(synsets, dtype=kind)})
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n2\n3\n1\n2\n")


def is_sorted(folder: Path) -> bool:
    found = {path.stem: (path.parent.name, path.read_text()) for path in folder.rglob("*.JPEG")}
    return (
        found == {name: (of, name) for name, of in CLASSES.items()}
        and len(list(folder.iterdir())) == 3
    )


def test_the_devkit_next_to_the_images_sorts_them(
    flat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again says that it is done."""
    devkit()
    for says in (
        "data/val: 6 images in 3 class folders\n",
        "data/val is sorted already: 6 images in 3 class folders\n",
    ):
        assert cli.run(["valprep", str(flat)]) == 0
        assert capsys.readouterr().out == says
        assert is_sorted(flat)


@pytest.mark.parametrize("line", ["{0},{1} 85 1 499 272", "{0}.JPEG {1}", "mv {0}.JPEG {1}/"])
def test_other_lists_are_read(line: str, flat: Path) -> None:
    """Kaggle's, a plain one, and the script that many have."""
    labels = Path("labels")
    labels.write_text(
        "\n".join(["ImageId,PredictionString", *(line.format(*each) for each in CLASSES.items())])
    )
    assert cli.run(["valprep", str(flat), "--labels", "labels"]) == 0
    assert is_sorted(flat)


def test_a_command_that_was_killed_is_finished_by_the_next(
    flat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class folder is whole or absent, so no training takes a part of
    the images for all of them.
    """
    devkit()
    rename = Path.rename
    left = [0]

    def killed(path: Path, target: Path) -> Path:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    for left[0] in (0, 3, 4, 1):
        assert cli.run(["valprep", str(flat)]) == 130
        for folder in flat.glob("n*"):
            assert {path.stem for path in folder.iterdir()} == {
                n for n in NAMES if CLASSES[n] == folder.name
            }
    left[0] = 99
    assert cli.run(["valprep", str(flat)]) == 0
    assert is_sorted(flat)


@pytest.mark.parametrize("broken", ["missing", "unknown", "no list", "other class", "no images"])
def test_nothing_moves_if_something_is_wrong(
    broken: str, flat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devkit()
    says = {
        "missing": (
            "1 of 6 images are missing, not in the labels, or in class folders: "
            "ILSVRC2012_val_00000003"
        ),
        "unknown": "not in the labels, or in class folders: ILSVRC2012_val_00000009",
        "no list": "6 of 0 images are missing, not in the labels",
        "other class": "or in class folders: ILSVRC2012_val_00000003",
        "no images": "data/none: No such file or directory",
    }[broken]
    line = ["valprep", "data/none" if broken == "no images" else str(flat)]
    if broken in ("missing", "other class"):
        (flat / f"{NAMES[2]}.JPEG").rename("aside.JPEG")
    if broken == "other class":
        (flat / "n03000000").mkdir()
        Path("aside.JPEG").rename(flat / "n03000000" / f"{NAMES[2]}.JPEG")
    if broken == "unknown":
        (flat / "ILSVRC2012_val_00000009.JPEG").touch()
    if broken == "no list":
        Path("other").write_text("cat dog")
        line += ["--labels", "other"]
    before = sorted(flat.rglob("*"))
    assert cli.run(line) == 2
    assert says in capsys.readouterr().err
    assert sorted(flat.rglob("*")) == before


def test_a_training_names_the_command(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data/train/n01000000").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save("data/train/n01000000/1.jpeg")
    assert cli.run(["train", "imagenet-resnet50", "data", "--device", "cpu"]) == 2
    assert (
        capsys.readouterr().err
        == "hvd-train: data/val has no class folders: type `hvd-train valprep data/val`\n"
    )
