"""Tar shards as WebDataset's writers make them, with the standard library alone."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

Files = Iterable[tuple[str, bytes]]


def write(shard: Path, files: Files) -> Path:
    """Write a tar with these files, in their order, and return its path."""
    shard.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(shard, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return shard


def of_folder(root: Path, target: Path, splits: Sequence[str] = ("train", "val"), per_shard: int = 7) -> Path:
    """Write the images of class folders as shards, in the order in which a folder has them, and return `target`."""
    for split in splits:
        classes = sorted(path.name for path in (root / split).iterdir())
        samples = [
            (f"{label}-{path.stem}", path, label)
            for label, name in enumerate(classes)
            for path in sorted((root / split / name).iterdir())
        ]
        for number in range(-(-len(samples) // per_shard)):
            part = samples[number * per_shard : (number + 1) * per_shard]
            files = [
                file
                for key, path, label in part
                for file in ((f"{key}{path.suffix}", path.read_bytes()), (f"{key}.cls", str(label).encode()))
            ]
            write(target / split / f"{number:03}.tar", files)
        (target / "classes.txt").write_text("\n".join(classes) + "\n")
    return target
