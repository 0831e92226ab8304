"""`hvd-train valprep`: sort ImageNet's validation images into class folders."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

from hvd_train import plain_file
from hvd_train.console import show
from hvd_train.errors import UsageError, first_few

_IMAGE = "ILSVRC2012_val_{:08}"
_UNFINISHED = ".unsorted"
_NEXT_TO_IT = "ILSVRC2012_devkit_t12", "LOC_val_solution.csv"
# NAME CLASS, also of Kaggle's csv and of the script valprep.sh
_LINE = re.compile(r"(ILSVRC2012_val_\d{8})(?:\.JPEG)?[\s,]+(n\d{8})\b")


def valprep(options: Namespace) -> int:
    """Sort the images, print what was done and return 0.

    Raises UsageError before an image moves.
    """
    folder: Path = options.folder
    near = [path for name in _NEXT_TO_IT if (path := folder.resolve().parent / name).exists()]
    labels = options.labels or (near[0] if near else None)
    if labels is None:
        raise UsageError(
            f"there is no {' or '.join(_NEXT_TO_IT)} next to {folder}: name one with --labels"
        )
    try:
        text = "" if labels.is_dir() else plain_file.read_bytes(labels).decode(errors="replace")
        classes = dict(_LINE.findall(text)) if text else _of_devkit(labels / "data")
        moved = sort(folder, classes)
    except OSError as error:
        raise UsageError(f"{error.filename or labels}: {error.strerror}") from None
    what = f"{len(classes):,} images in {len(set(classes.values())):,} class folders"
    show(f"{folder}: {what}" if moved else f"{folder} is sorted already: {what}")
    return 0


def _of_devkit(data: Path) -> dict[str, str]:
    from scipy.io import loadmat  # slow to import

    try:
        synsets = loadmat(data / "meta.mat", squeeze_me=True)["synsets"]
        names = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
        text = plain_file.read_text(data / "ILSVRC2012_validation_ground_truth.txt")
        return {
            _IMAGE.format(number): names[int(line)] for number, line in enumerate(text.split(), 1)
        }
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{data} is no data folder of ILSVRC2012_devkit_t12: {error!r}") from None


def sort(folder: Path, classes: dict[str, str]) -> bool:
    """Move the images into class folders; return False if they are there.

    Raises UsageError before anything moves.

    Until all are sorted, the class folders are in a hidden one, so no training takes a part of the
    set for the whole.
    """
    unfinished = folder / _UNFINISHED
    flat = {path.stem: path for path in folder.iterdir() if path.suffix == ".JPEG"}
    done = [
        path
        for parent in (unfinished, *([] if flat else [folder]))
        for path in parent.glob("n*/*.JPEG")
    ]
    found = {stem: classes.get(stem, "unknown") for stem in flat} | {
        path.stem: path.parent.name for path in done
    }
    wrong = [stem for stem in sorted(found | classes) if found.get(stem) != classes.get(stem)]
    if wrong or not classes:
        what = (
            f"{len(wrong):,} of {len(classes):,} images are missing, not in the "
            "labels, or in class folders"
        )
        raise UsageError(f"{folder}: {what}: {first_few(wrong)}")
    for stem, path in flat.items():
        (unfinished / classes[stem]).mkdir(parents=True, exist_ok=True)
        path.rename(unfinished / classes[stem] / path.name)
    if not unfinished.exists():
        return False
    for one in sorted(unfinished.iterdir()):
        one.rename(folder / one.name)
    unfinished.rmdir()
    return True
