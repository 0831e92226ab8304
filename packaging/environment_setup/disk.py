"""Free space on the file systems that a set-up writes to."""

import os
import shutil
from pathlib import Path
from typing import Dict, List, Optional

from environment_setup.machine import cache_home

GIB = 2**30


def disk_problems(needs: Dict[Path, float]) -> List[str]:
    """Return a line for each file system with less free space than the GiB that will be written to its folders."""
    totals: Dict[int, float] = {}
    places: Dict[int, List[Path]] = {}
    for path, gib in needs.items():
        there = existing(path)
        device = os.stat(str(there)).st_dev
        totals[device] = totals.get(device, 0) + gib
        places.setdefault(device, []).append(there)
    problems = []
    for device, gib in totals.items():
        free = shutil.disk_usage(str(places[device][0])).free / GIB
        if free < gib:
            names = " and ".join(dict.fromkeys(str(place) for place in places[device]))
            line = "not enough disk space: {:.1f} GB free in {}, set-up takes up to {:.0f} GB there: make room"
            problems.append(line.format(free, names, gib) + (", or set TMPDIR elsewhere" if len(needs) > 1 else ""))
    return problems


def has_room(path: Path, gib: float) -> bool:
    """Return whether the file system of a path, which need not exist, has that much free space."""
    return shutil.disk_usage(str(existing(path))).free >= gib * GIB


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return path if path.exists() or path == path.parent else existing(path.parent)


def size_of(folder: Path) -> int:
    """Return the bytes on disk that a folder takes."""
    return sum(
        (Path(top) / name).lstat().st_blocks * 512
        for top, _, names in os.walk(str(folder))
        for name in names
        if os.path.lexists(os.path.join(top, name))
    )


def pip_cache() -> Optional[Path]:
    """Return the folder where pip keeps downloads, or None where its settings forbid that."""
    if os.environ.get("PIP_NO_CACHE_DIR", "").lower() in ("1", "true", "on", "yes"):
        return None
    return Path(os.environ.get("PIP_CACHE_DIR") or cache_home() / "pip")
