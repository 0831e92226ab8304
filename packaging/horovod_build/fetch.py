"""Fetch the release through pip, and unpack it."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

from horovod_build.cache import cache_folder, file_digest
from horovod_build.errors import BuildError
from horovod_build.show import step
from horovod_build.workshop import Workshop

REQUIREMENT = Path(__file__).resolve().parents[1] / "horovod.txt"


def read_requirement(path: Path = REQUIREMENT) -> tuple[str, str]:
    """Return version and SHA-256 of the release. Raises BuildError if the file does not hold them."""
    match = re.search(r"^horovod==(\S+) --hash=sha256:([0-9a-f]{64})$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if not match:
        raise BuildError(f"{path.name} does not hold a line 'horovod==VERSION --hash=sha256:DIGEST'")
    return match.group(1), match.group(2)


def fetch_release(version: str, sha256: str, shop: Workshop, env: dict[str, str]) -> Path:
    """Return the source archive of the release, from the cache or through pip with the settings of the user.

    Raises BuildError if it cannot be fetched or has another digest.
    """
    kept = cache_folder() / "sources" / f"horovod-{version}.tar.gz"
    kept.parent.mkdir(exist_ok=True)
    if kept.exists() and file_digest(kept) == sha256:
        return kept
    requirement, folder = shop.copy_of(REQUIREMENT), shop.folder / "download"
    source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--require-hashes"]
    with step(f"fetched horovod {version}"):
        shop.run(
            f"fetching horovod {version} (is the package index reachable?)",
            shop.pip("download", *source, "-r", requirement, "-d", folder),
            {name: value for name, value in env.items() if name != "HOROVOD_LOCAL_VERSION"},  # pip compares it
        )
    archive = folder / kept.name
    if file_digest(archive) != sha256:
        raise BuildError(f"{archive.name} is not the file that {REQUIREMENT.name} names: its digest differs")
    part = kept.with_suffix(f".{os.getpid()}.part")
    shutil.copyfile(archive, part)
    part.rename(kept)
    return kept


def unpack(archive: Path, shop: Workshop) -> Path:
    """Unpack the release and return its top folder."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(shop.folder, filter="data")
        else:  # Python 3.10 and 3.11 before their security releases; the digest was checked
            tar.extractall(shop.folder)  # noqa: S202
    return shop.folder / archive.name.removesuffix(".tar.gz")
