"""Whether an elastic job survives what happens to its workers, over real NCCL, and leaves nothing on the GPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_check.elastic_job import ElasticJob
from benchmarks.gpu_check.findings import Failed, Finding, NotApplicable, Seen, checked
from benchmarks.gpu_check.site import Site

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"
RANKS, RESETS = 3, 10
BUSY_S, LIMIT_S = 8, 5  # longer than the limit of an operation: the GPU has work before the sum, and nobody is silent
MOST_LEFT = 16 << 20  # bytes of a reset; a communicator that is not freed has some hundred


def checks(site: Site) -> Iterator[Finding]:
    """Give the workers of one job faults, one after another; then keep a stream busy."""
    try:
        site.needs_ranks(2)
        job = ElasticJob(site, str(SCRIPT), min(2 if site.short else RANKS, site.machine.most_ranks))
    except NotApplicable as reason:
        yield Finding("faults", "not applicable", str(reason))
        return
    yield checked("first steps", lambda: (f"after {job.train_on():.0f} s", {}))
    used: list[int] = []
    yield checked("memory before", partial(in_use, job, used))
    yield checked("kill -9 of rank 0", lambda: job.strike(job.rank_0(), signal.SIGKILL))
    if not site.short:
        yield checked("kill -9 of a rank", lambda: job.strike(job.another(), signal.SIGKILL))
        yield checked("SIGSTOP of a rank", lambda: job.strike(job.another(), signal.SIGSTOP))
        for number in range(4, RESETS + 1):
            yield checked(f"reset {number}", lambda: job.strike(job.another(but_rank_0=False), signal.SIGKILL))
    yield checked("memory after", partial(left, job, used))
    yield checked("audit", job.end)
    yield checked("a busy stream", partial(busy, site))


def in_use(job: ElasticJob, used: list[int]) -> Seen:
    """Take down how much memory the job and all others use on the GPUs."""
    if job.site.machine.is_stand_in:
        raise NotApplicable("each process has devices of its own on the stand-in")
    used.append(job.gpu_memory())
    return f"{used[-1] >> 20} MiB", {"bytes": used[-1]}


def left(job: ElasticJob, used: list[int]) -> Seen:
    """Check that the same ranks use no more memory than before the resets."""
    in_use(job, used)
    if len(used) < 2:
        raise NotApplicable("what was in use before the resets is not known")
    resets = max(1, len(job.events()) // 2)
    grown = used[-1] - used[0]
    figures = {"bytes": used[-1], "grown": grown, "resets": resets}
    seen = f"{grown / 2**20:+.0f} MiB after {resets} resets"
    if grown > MOST_LEFT * resets:
        raise Failed(seen, **figures)
    return seen, figures


def busy(site: Site) -> Seen:
    """Queue a sum behind a kernel that takes longer than the limit of an operation: no rank may be called silent."""
    ranks, seconds, limit_s = 2, *((2, 1) if site.short else (BUSY_S, LIMIT_S))
    limits = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": str(limit_s)}
    seen = site.job("busy", ranks, str(seconds), limit_s=seconds + 120, **limits)
    if wrong := [one for one in seen if one != "right"]:
        raise Failed(f"{len(wrong)} of {ranks} ranks: {wrong[0]}")
    if len(seen) != ranks:
        raise Failed(f"{len(seen)} of {ranks} ranks have answered")
    return f"the sum behind {seconds} s of work is right, with a limit of {limit_s} s", {}
