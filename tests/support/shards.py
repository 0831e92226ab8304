"""Shards to read, and a file system for them that fails, counts and is shared by processes."""

import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


def write_samples(path: Path, samples: Iterable[Mapping[str, bytes]], first: int = 0) -> None:
    """Write a tar file of samples, by extension; their keys are numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, parts in enumerate(samples, first):
            for name, content in parts.items():
                _add(tar, f"{number}.{name}", content)


def write_tar(path: Path, keys: Iterable[str], **parts: int) -> Path:
    """Write a tar file of samples; `parts` have the number of bytes by extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for name, size in (parts or {"bin": 3}).items():
                _add(tar, f"{key}.{name}", key.encode().ljust(size, b"-"))
    return path


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def keys_of(shards: Any) -> list[str]:
    return [shards[number]["__key__"] for number in range(len(shards))]


class Shaky(LocalFileSystem):  # type: ignore[misc]
    """The local files at shaky://PATH. The next copies fail with `errors`; each is written to
    `fetched`.
    """

    protocol = "shaky"
    errors: ClassVar[list[BaseException]] = []
    fetched: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("shaky://"))
        return stripped

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
