"""Identify the data of a run, to notice a change before a resume."""

import hashlib
from collections.abc import Sequence
from typing import Any

from hvd_train.data.dataset import Arrays, DataSet, Source
from hvd_train.errors import UsageError, first_few

Identity = dict[str, Any]
"""The names of "classes"; in "training" and "validation", [count, digest] of each class folder and ("") of all."""

_PARTS = ("training", "validation")


def of(data: DataSet, *, sizes: bool, parts: Sequence[str] = _PARTS) -> Identity:
    """Return the identity of these parts of a data set; `sizes` includes file sizes."""
    sets = {part: source for part, source in zip(_PARTS, (data.train, data.val), strict=True) if part in parts}
    samples = {part: s if s is None else _samples(s, data.classes, sizes=sizes) for part, s in sets.items()}
    return {"classes": list(data.classes), **samples}


def facts(data: DataSet) -> dict[str, str]:
    """Return what all ranks must have in common, by name, without the sizes of files."""
    digest = _digest(repr(of(data, sizes=False)).encode())
    return {"the data set": f"{len(data.train)} training samples of {len(data.classes)} classes, digest {digest}"}


def classes(target: object, run: Identity | None) -> tuple[str, ...]:
    """Return the names of a run's classes. Raises UsageError, which names the `target`, if they are not known."""
    names = run.get("classes") if isinstance(run, dict) else None
    if not isinstance(names, list) or not names:
        raise UsageError(f"{target}: the names of its classes are not known, since its data.json is missing or damaged")
    return tuple(map(str, names))


def differences(now: Identity | None, run: Identity | None) -> dict[str, str]:
    """Describe how the parts of `now` differ from a run's. Raises UsageError if `run`, from a file, is no identity."""
    if now is None or run is None or now == run:
        return {}
    try:
        if now["classes"] != run["classes"]:
            return {"classes": _classes(now["classes"], run["classes"])}
        parts = [part for part in _PARTS if part in now and now[part] != run[part]]
        return {part: f"the {part} set has {_samples_differ(now[part], run[part])}" for part in parts}
    except (TypeError, KeyError, AttributeError):
        raise UsageError("what the run says of its data is damaged; start again with --resume never") from None


def _classes(now: list[str], run: list[str]) -> str:
    if len(now) == len(run):
        return first_few([f"class {old!r} is now {name!r}" for old, name in zip(run, now, strict=True) if old != name])
    odd = [f"{name!r} is new" for name in now if name not in run]
    odd += [f"{name!r} is missing" for name in run if name not in now]
    return f"there are {len(now)} classes, the run had {len(run)}: class {first_few(odd)}"


def _samples_differ(now: Identity | None, run: Identity | None) -> str:
    mine, theirs = now or {"": [0, ""]}, run or {"": [0, ""]}
    count, before = mine[""][0], theirs[""][0]
    text = f"{count} images, the run had {before}" if count != before else "other images than the run had"
    names = [repr(name) for name in mine if name and mine[name] != theirs.get(name)]
    return f"{text} (in class {first_few(names)})" if names else text


def _samples(source: Source, classes: tuple[str, ...], *, sizes: bool) -> dict[str, list[object]]:
    labels = source.labels.cpu().contiguous().numpy().tobytes() if isinstance(source, Arrays) else b""
    found: dict[str, list[object]] = {"": [len(source), _digest(labels)]}
    if (files_of_classes := getattr(source, "files_of_classes", None)) is not None:
        files = zip(classes, files_of_classes(sizes=sizes), strict=True)
        found |= {name: [count, _digest(content)] for name, (count, content) in files}
    return found


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
