"""What commands of this machine print, and where its folders are."""

import os
import subprocess
from pathlib import Path
from typing import List


def output_of(command: List[str]) -> str:
    """Return what a command prints on stdout, or "" where it fails or cannot be run."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL).decode(errors="replace")
    except (OSError, subprocess.CalledProcessError):
        return ""


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same existing folder."""
    try:
        return os.path.samefile(str(one), str(other))
    except OSError:
        return False


def cache_home() -> Path:
    """Return the folder where programs keep what they can use again, such as downloads."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
