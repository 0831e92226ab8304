"""Get the wheel of a plan: from the cache, or fetched, patched and compiled."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from horovod_build.cache import WheelCache, cache_folder
from horovod_build.errors import BuildError
from horovod_build.fetch import fetch_release, unpack
from horovod_build.patches import apply_patch
from horovod_build.plan import Plan
from horovod_build.show import Progress, say, step
from horovod_build.variables import build_environment
from horovod_build.workshop import workshop


def obtain_wheel(plan: Plan, force: bool, jobs: int | None) -> Path:
    """Return the wheel of this plan, from the cache unless `force`, or built with `jobs` compilers at a time.

    Raises BuildError if the build fails.
    """
    cache = WheelCache()
    with cache.lock(plan.key):
        wheel = None if force else cache.wheel(plan.key)
        if wheel is not None:
            say(f"wheel {plan.key} is in the cache")
            return wheel
        if not force and (cache.folder / plan.key).exists():
            say(f"the cached wheel {plan.key} is damaged: building it again")
        return build(plan, jobs or default_jobs(), cache)


def build(plan: Plan, jobs: int, cache: WheelCache) -> Path:
    """Fetch, patch and compile the release; return the wheel in the cache. Raises BuildError."""
    log = cache_folder() / "logs" / f"{plan.key}.log"
    with workshop(log) as shop:
        log.write_text(json.dumps(plan.inputs(), indent=1) + "\n", encoding="utf-8")
        env = build_environment(plan, shop, jobs)
        archive = fetch_release(plan.horovod, plan.sha256, shop, env)
        num_added = sum(len(patch.adds) for patch in plan.patches)
        with step(f"unpacked, applied {len(plan.patches)} patches and added {num_added} files"):
            tree = unpack(archive, shop)
            for patch in plan.patches:
                apply_patch(patch, tree)
        record = json.dumps(build_record(plan), indent=1) + "\n"
        (tree / "horovod" / "hvd_train_build.json").write_text(record, encoding="utf-8")
        say(f"compiling with {jobs} jobs (minutes); log: {log}")
        only_this = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
        command = shop.pip("wheel", "-v", *only_this, "-w", shop.folder / "wheel", tree)
        with step("compiled"), Progress(sys.stdout) as progress:
            shop.run("compiling", command, env, progress)
        wheels = list((shop.folder / "wheel").glob("horovod-*.whl"))
        if not wheels:
            raise BuildError("compiling made no wheel", f"  full log: {log}")
        return cache.publish(plan.key, wheels[0], plan.inputs())


def build_record(plan: Plan) -> dict[str, Any]:
    """Return the contents of horovod/hvd_train_build.json, which describes the wheel."""
    return {
        "horovod": plan.horovod,
        "key": plan.key,
        "torch": plan.torch.version,
        "torch_cuda": plan.torch.cuda,
        "python": platform.python_version(),
        "gloo": True,
        "mpi": str(plan.mpi) if plan.mpi else None,
        "nccl": plan.cuda.nccl_version if plan.cuda else None,
        "nvcc": plan.cuda.version if plan.cuda else None,
        "cuda_archs": list(plan.cuda.archs) if plan.cuda else None,
        "compiler": str(plan.compiler),
        "patches": [
            {"name": patch.name, "file": patch.file, "why": patch.why, "adds": [source.path for source in patch.adds]}
            for patch in plan.patches
        ],
        "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def default_jobs() -> int:
    """Return the number of compilers to run at a time: one per processor, with 2 GB of free memory for each."""
    try:
        info = Path("/proc/meminfo").read_text(encoding="utf-8")
        free_gb = int(re.findall(r"MemAvailable:\s+(\d+)", info)[0]) / 2**20
    except (OSError, IndexError):
        free_gb = 2.0
    return max(1, min(len(os.sched_getaffinity(0)), int(free_gb // 2)))
