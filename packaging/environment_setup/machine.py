"""What this machine answers."""

import os
import subprocess
from pathlib import Path
from typing import List


def output_of(command: List[str]) -> str:
    """What a command prints; nothing where it fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL).decode(errors="replace")
    except (OSError, subprocess.CalledProcessError):
        return ""


def same_folder(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder."""
    try:
        return os.path.samefile(str(one), str(other))
    except OSError:
        return False


def cache_home() -> Path:
    """Where programs keep what they can use again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
