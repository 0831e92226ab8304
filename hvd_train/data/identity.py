"""Identify the data of a run, to notice a change before a resume."""

import hashlib
from itertools import zip_longest
from typing import Any

from hvd_train.data.dataset import Arrays, DataSet, Source
from hvd_train.data.plain import with_plain_numbers
from hvd_train.errors import UsageError

Identity = dict[str, Any]
"""The names of "classes"; in "training" and "validation", the number of samples, and a digest of names or labels."""


def of(data: DataSet) -> Identity:
    """Return the identity of a data set, without its test set."""
    sets = {"training": data.train, "validation": data.val}
    samples = {part: [len(source or ()), _digest(_content(source))] for part, source in sets.items()}
    return {"classes": with_plain_numbers(list(data.classes)), **samples}


def facts(data: DataSet) -> dict[str, str]:
    """Return what all ranks must have in common, by name."""
    digest = _digest(repr(of(data)).encode())
    return {"the data set": f"{len(data.train)} training samples of {len(data.classes)} classes, digest {digest}"}


def classes(target: object, run: Identity | None) -> tuple[str, ...]:
    """Return the names of a run's classes. Raises UsageError, which names the `target`, if they are not known."""
    names = run.get("classes") if isinstance(run, dict) else None
    if not isinstance(names, list) or not names:
        raise UsageError(f"{target}: the names of its classes are not known, since its data.json is missing or damaged")
    return tuple(map(str, names))


def differences(now: Identity | None, run: Identity | None) -> dict[str, str]:
    """Describe how the parts of `now` differ from a run's. Raises UsageError if `run`, from a file, is no identity."""
    if now is None or run is None:
        return {}
    try:
        for number, (name, old) in enumerate(zip_longest(now["classes"], run["classes"])):
            if name != old:
                return {"classes": f"class {number} is {name!r}, the run had {old!r}"}
        parts = [part for part in ("training", "validation") if now[part] != run[part]]
        return {part: f"the {part} set has {_samples_differ(*now[part], *run[part])}" for part in parts}
    except (TypeError, KeyError):
        raise UsageError("what the run says of its data is damaged; start again with --resume never") from None


def _samples_differ(count: int, _: str, before: int, __: str) -> str:
    return f"{count} images, the run had {before}" if count != before else "other images than the run had"


def _content(source: Source | None) -> bytes:
    if isinstance(source, Arrays):
        return source.labels.cpu().contiguous().numpy().tobytes()
    content = getattr(source, "content_of_files", None)
    return b"" if content is None else content()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
