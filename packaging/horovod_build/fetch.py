"""What a build fetches through pip: the release, and build tools that the environment lacks."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import tarfile
from pathlib import Path

from horovod_build.cache import cache_folder, file_digest, own_folder
from horovod_build.errors import BuildError
from horovod_build.machine import installed_version, output_of
from horovod_build.show import step
from horovod_build.workshop import Workshop

REQUIREMENT = Path(__file__).resolve().parents[1] / "horovod.txt"
BUILD_TOOLS = {"setuptools": "setuptools>=64", "wheel": "wheel", "packaging": "packaging"}
CMAKE_REQUIREMENT = "cmake>=3.21,<4"  # 4 refuses the Gloo that Horovod bundles


def read_requirement(path: Path = REQUIREMENT) -> tuple[str, str]:
    """Return version and SHA-256 of the release. Raises BuildError where the file does not hold them."""
    match = re.search(r"^horovod==(\S+) --hash=sha256:([0-9a-f]{64})$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if not match:
        raise BuildError(f"{path.name} does not hold a line 'horovod==VERSION --hash=sha256:DIGEST'")
    return match.group(1), match.group(2)


def fetch_release(version: str, sha256: str, shop: Workshop, env: dict[str, str]) -> Path:
    """Return the source archive of the release, from the cache or through pip with the settings of the user.

    Raises BuildError where it cannot be fetched or has another digest.
    """
    kept = own_folder(cache_folder() / "sources") / f"horovod-{version}.tar.gz"
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


def fetch_tools(shop: Workshop, env: dict[str, str]) -> None:
    """Put build tools that are missing into the folder of the build, not into the environment.

    `env` is changed so that they are found. Raises BuildError where they cannot be fetched.
    """
    wanted = [requirement for name, requirement in BUILD_TOOLS.items() if installed_version(name) is None]
    cmake = find_cmake()
    if cmake is None:
        wanted.append(CMAKE_REQUIREMENT)
    tools = shop.folder / "tools"
    if wanted:
        command = shop.pip("install", "--no-warn-script-location", "--target", tools, *wanted)
        with step(f"fetched {', '.join(wanted)} for this build"):
            shop.run("fetching build tools", command, env)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tools), env.get("PYTHONPATH"))))
        env["PATH"] = f"{tools / 'bin'}{os.pathsep}{env['PATH']}"
    env["HOROVOD_CMAKE"] = str(shop.path(cmake) if cmake else tools / "bin" / "cmake")


def find_cmake() -> Path | None:
    """Return a CMake that reads CMAKE_TOOLCHAIN_FILE and still accepts the bundled Gloo; None where there is none."""
    own = os.pathsep.join([sysconfig.get_path("scripts"), *os.get_exec_path()])
    found = shutil.which("cmake", path=own)
    match = re.search(r"cmake version (\d+)\.(\d+)", output_of(found, "--version")) if found else None
    return Path(found) if found and match and (3, 21) <= (int(match[1]), int(match[2])) < (4, 0) else None
