"""For which GPUs the kernels of this build of Horovod are compiled."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

BUILD_FILE = "hvd_train_build.json"  # packaging/build_horovod.py puts it into the wheel


def compiled_for() -> list[int] | None:
    """Return the compute capabilities, such as 90 for 9.0, that Horovod is compiled for; None where nobody says so."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    try:
        archs = json.loads((Path(spec.origin).parent / BUILD_FILE).read_text(encoding="utf-8")).get("cuda_archs")
    except (OSError, ValueError, AttributeError):
        return None
    return archs if isinstance(archs, list) and archs and all(isinstance(arch, int) for arch in archs) else None


def covers(archs: Sequence[int], capability: int) -> bool:
    """Return whether code for `archs` runs on a GPU of this capability.

    Code runs on GPUs of the same generation that are not older. For the newest of `archs` there is PTX as well, which
    drivers compile for newer GPUs.
    """
    return capability >= max(archs) or any(arch // 10 == capability // 10 and arch <= capability for arch in archs)


def todo(archs: Sequence[int], capabilities: Iterable[int]) -> str:
    """Return what to type for a Horovod with code for these GPUs, too."""
    wanted = ",".join(str(arch) for arch in sorted({*archs, *capabilities}))
    return f"HOROVOD_BUILD_CUDA_CC_LIST={wanted} python packaging/build_horovod.py, in a checkout of hvd_train"
