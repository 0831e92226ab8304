"""Identify the data of a run, to notice a change before a resume and a difference between ranks."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_train.data.dataset import Arrays, DataSet, Source
from hvd_train.data.plain import with_plain_numbers
from hvd_train.errors import UsageError

Identity = dict[str, Any]
"""The names of "classes"; in "training" and "validation", the number of samples, and a digest of
names or labels; in "items", a digest of a few items of each set, by its name, if it was read; and
in "order", a digest of an own order, or of the weights, lengths or shards that decide it."""
SEEDED = (
    "seed what draws them (torch, numpy and random are seeded for --data, and by "
    "hvd_train.parse_args); sort what comes from a set, or export PYTHONHASHSEED=0"
)


def of(data: DataSet) -> Identity:
    """Return the identity of a data set, without its test set and without items."""
    sets = {"training": data.train, "validation": data.val}
    samples = {
        # a tensor has no truth value
        part: [0 if source is None else len(source), digest_of_bytes(_content(source))]
        for part, source in sets.items()
    }
    return {"classes": with_plain_numbers(list(data.classes)), **samples}


def facts(identity: Identity) -> dict[str, str]:
    """Return what all ranks must have in common, by name and what to do if it differs."""
    count, _ = identity["training"]
    classes = identity["classes"]
    digest = digest_of_bytes(repr([classes, identity["training"], identity["validation"]]).encode())
    found = {"the data set": f"{count} training samples of {len(classes)} classes, digest {digest}"}
    for part, of_items in identity.get("items", {}).items():
        found |= facts_of_items(part, of_items)
    if "order" in identity:
        advice = "its function, weights or lengths must be equal on all ranks"
        found[f"the order of samples; {advice}"] = identity["order"]
    return found


def facts_of_items(part: str, digest: str) -> dict[str, str]:
    """Return the same for the items of one set."""
    return {f"the items of the {part} set; {SEEDED}": digest}


def classes(target: object, run: Identity | None) -> tuple[str, ...]:
    """Return the names of a run's classes.

    Raises UsageError, which names the `target`, if they are not known.
    """
    names = run.get("classes") if isinstance(run, dict) else None
    if not isinstance(names, list) or not names:
        raise UsageError(
            f"{target}: the names of its classes are not known, since its data.json "
            "is missing or damaged"
        )
    return tuple(map(str, names))


def differences(now: Identity | None, run: Identity | None) -> dict[str, str]:
    """Describe how the parts of `now` differ from a run's.

    Raises UsageError if `run`, from a file, is no identity.
    """
    if now is None or run is None:
        return {}
    try:
        for number, (name, old) in enumerate(zip_longest(now["classes"], run["classes"])):
            if name != old:
                return {"classes": f"class {number} is {name!r}, the run had {old!r}"}
        parts = [part for part in ("training", "validation") if now[part] != run[part]]
        found = {
            part: f"the {part} set has {_samples_differ(*now[part], *run[part])}" for part in parts
        }
        before = run.get("items", {})
        for part, digest in now.get("items", {}).items():
            if before.get(part, digest) != digest:
                found.setdefault(part, f"items of the {part} set differ from the run's ({SEEDED})")
        if now.get("order") != run.get("order"):
            found["order"] = "the order of samples is not that of the run"
        return found
    except (TypeError, KeyError, AttributeError):
        raise UsageError(
            "what the run says of its data is damaged; start again with --resume never"
        ) from None


def _samples_differ(count: int, _: str, before: int, __: str) -> str:
    return (
        f"{count} images, the run had {before}"
        if count != before
        else "other images than the run had"
    )


def _content(source: Source | None) -> bytes:
    if isinstance(source, Arrays):
        return source.labels.cpu().contiguous().numpy().tobytes()
    content = getattr(source, "content_of_files", None)
    return b"" if content is None else content()


def digest_of_bytes(content: bytes) -> str:
    """Return a short digest."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def digest_of_items(items: object) -> str:
    """Return a digest of trees of tensors, arrays, numbers and texts; of other
    objects it has the types alone.

    It has sums of floating-point tensors and of images, in three digits: another processor may
    round otherwise, and another version of a library may decode otherwise.
    """
    return digest_of_bytes("\n".join(_words(items)).encode())


def _words(tree: object) -> Iterator[str]:
    # an array, or an image of Pillow
    if hasattr(tree, "__array_interface__") and not isinstance(tree, Tensor):
        array = np.asarray(tree)
        tree = torch.from_numpy(array.copy()) if array.dtype.kind in "biufc" else array.tolist()
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = vars(tree) if hasattr(tree, "__dict__") else dataclasses.asdict(tree)
    if isinstance(tree, Tensor):
        yield f"{tree.dtype} {list(tree.shape)}"
        with suppress(RuntimeError, TypeError):  # a quantized tensor, for instance
            yield from [*_words_of_tensor(tree)]
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield f"{name}:"
            yield from _words(value)
    elif isinstance(tree, (list, tuple)):
        yield f"{len(tree)} of"
        for value in tree:
            yield from _words(value)
    elif isinstance(tree, float):
        yield f"{tree:.2e}"
    elif isinstance(tree, (int, str, bytes)):
        yield repr(tree)
    else:
        yield type(tree).__name__


def _words_of_tensor(tensor: Tensor) -> Iterator[str]:
    tensor = tensor.detach().cpu()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.to_dense()
    if not (tensor.is_floating_point() or tensor.dtype == torch.uint8):
        yield digest_of_bytes(tensor.contiguous().numpy().tobytes())
        return
    values = tensor.double().flatten()
    rising = torch.linspace(0.5, 1, len(values), dtype=torch.float64)
    # without differences of large numbers
    for part in (values.clamp(min=0), (-values).clamp(min=0)):
        yield f"{part.sum():.2e} {(part * rising).sum():.2e}"
