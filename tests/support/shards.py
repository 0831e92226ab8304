"""Shards to read, and a file system for them that fails and counts."""

import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from tests.support.jpegs import encoded
from tests.support.worlds import own_generator


def write_samples(path: Path, samples: Iterable[Mapping[str, bytes]]) -> None:
    """Write a tar file of samples, by extension; their keys are numbers."""
    _write(
        path,
        (
            (f"{number}.{name}", content)
            for number, parts in enumerate(samples)
            for name, content in parts.items()
        ),
    )


def write_tar(path: str | Path, keys: Iterable[str], **parts: int) -> Path:
    """Write a tar file of samples; `parts` have the number of bytes by extension."""
    return _write(
        Path(path),
        (
            (f"{key}.{name}", key.encode().ljust(size, b"-"))
            for key in keys
            for name, size in (parts or {"bin": 3}).items()
        ),
    )


def _write(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_digits(folder: Path, samples: int) -> None:
    """Write shards of this many digits as images below train/ and val/."""
    digits = load_digits()
    whole = [
        {"png": encoded(Image.fromarray((image * 15).astype("u1")), "png"), "cls": b"%d" % label}
        for image, label in zip(digits.images, digits.target, strict=True)
    ]
    for part, chosen in (("val", whole[:360]), ("train", whole[360:])):
        for first in range(0, len(chosen), samples):
            write_samples(folder / part / f"{first:04}.tar", chosen[first : first + samples])
    (folder / "classes.txt").write_text("\n".join("0123456789"))


def network(num_classes: int) -> nn.Module:
    """Return a network for these images, without kinks, so that runs agree to 1e-5."""
    layers = nn.Linear(3 * 64, 64), nn.Tanh(), nn.Linear(64, num_classes)
    return own_generator(nn.Sequential(nn.Flatten(), *layers))


def keys_of(shards: Any) -> list[str]:
    return [shards[number]["__key__"] for number in range(len(shards))]


class Shaky(LocalFileSystem):  # type: ignore[misc]
    """The local files at shaky://PATH. The next copies fail with `errors`; each is written to
    `fetched`.
    """

    protocol = "shaky"
    errors: ClassVar[list[BaseException]] = []
    fetched: ClassVar[list[str]] = []

    def get_file(self, path: str, local: str, *_: object, **__: object) -> None:
        Shaky.fetched.append(Path(path).name)
        content = Path(path).read_bytes()
        if Shaky.errors:
            Path(local).write_bytes(content[: len(content) // 2])
            if isinstance(error := Shaky.errors.pop(0), SystemExit):
                os.kill(os.getpid(), 9)
            raise error
        Path(local).write_bytes(content)


fsspec.register_implementation("shaky", Shaky, clobber=True)
