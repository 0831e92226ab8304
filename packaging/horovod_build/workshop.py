"""The temporary folder of one build, and the commands that run in it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from horovod_build.cache import cache_folder
from horovod_build.errors import BuildError
from horovod_build.show import Progress, first_errors

NEEDED_DISK_MB = 1200


def build_folder() -> Path:
    """Return a folder for temporary files without a blank in its path, where make and CMake split.

    Raises BuildError if there is none.
    """
    too_small = []
    for folder in (Path(tempfile.gettempdir()), Path("/var/tmp"), cache_folder()):  # noqa: S108
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            free_mb = shutil.disk_usage(folder).free // 2**20
            if free_mb >= NEEDED_DISK_MB and " " not in str(folder) and os.access(folder, os.W_OK):
                return folder
            too_small.append(f"{folder}: {free_mb} MB")
    raise BuildError(
        f"too little room for temporary files: {NEEDED_DISK_MB} MB are needed ({', '.join(too_small)}); "
        "free some, or set TMPDIR to a folder that has it"
    )


@dataclass(frozen=True)
class Workshop:
    """The temporary folder of one build; its paths have no blank, even if the environment's path does."""

    folder: Path
    prefix: Path  # the environment
    log: Path

    def path(self, path: Path) -> Path:
        """Return a path of the environment through this folder's symlink; other paths unchanged."""
        with contextlib.suppress(ValueError):
            return self.prefix / path.relative_to(sys.prefix)
        return path

    def copy_of(self, path: Path) -> Path:
        """Copy a file into this folder and return the path of the copy."""
        return Path(shutil.copy(path, self.folder))

    def pip(self, *arguments: str | Path) -> list[str]:
        """Return a command that runs pip in the environment."""
        return [str(self.path(Path(sys.executable))), "-m", "pip", *map(str, arguments)]

    def run(self, what: str, command: list[str], env: dict[str, str], progress: Progress | None = None) -> None:
        """Run a command with its output in the log. Raises BuildError with errors from the log if it fails."""
        with self.log.open("a", encoding="utf-8") as log:
            print("$", shlex.join(command), file=log, flush=True)
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that make and its compilers can be ended together
            )
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    log.write(line)
                    if progress:
                        progress.feed(line)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                raise
        if process.wait() != 0:
            errors = [f"  {line}" for line in first_errors(self.log)]
            raise BuildError(f"{what} failed", *errors, f"  full log: {self.log}")


@contextlib.contextmanager
def workshop(log: Path) -> Iterator[Workshop]:
    """Make the temporary folder of one build, and delete it afterwards; the log stays. Raises BuildError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd_train-build-", dir=build_folder()) as name:
        folder = Path(name)
        prefix = Path(sys.prefix)
        if " " in sys.prefix:
            prefix = folder / "env"
            prefix.symlink_to(sys.prefix)
        yield Workshop(folder, prefix, log)
