"""Memory: the state of a large network, a batch that does not fit; and the same training under mpirun."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.findings import Failed, Finding, NotApplicable, Seen, checked
from benchmarks.gpu_check.site import JOBS, PROGRAMS, Site, answers

HVD_TRAIN = str(PROGRAMS / "hvd-train")


def checks(site: Site) -> Iterator[Finding]:
    """Look at a state, at a batch that does not fit, and at mpirun."""
    yield checked("state", partial(state, site))
    yield checked("a batch that does not fit", partial(too_large, site))
    if not site.short:
        yield checked("mpirun -np 2", partial(mpirun, site))


def state(site: Site) -> Seen:
    """Save, digest and load the state of ResNet-50."""
    network = "squeezenet1_1" if site.short else "resnet50"
    (seen,) = answers(site.run("state", [sys.executable, "-m", f"{JOBS}.state", network]))
    if not seen["equal"]:
        raise Failed("the state that was loaded is not the one that was saved", **seen)
    times = ", ".join(
        f"{name} {statistics.median(seen[name]) * 1000:.0f} ms" for name in ("snapshot", "digest", "load")
    )
    peak = f"{seen['more_at_the_peak'] >> 20} MiB more at the peak"
    return f"{network}, {seen['bytes_on_gpu'] >> 20} MiB: {times}; {peak}", seen


def too_large(site: Site) -> Seen:
    """Ask for a batch that fits into no GPU: one line, no traceback."""
    side = 32 if site.short else 224
    batch = site.machine.gpu_bytes // (3 * side * side) + 1  # its bytes alone do not fit
    size = f"--image-size {side} --global-batch-size {batch} --batch-size {batch} --synthetic-samples {batch}".split()
    command = [HVD_TRAIN, "train", "imagenet-resnet50", "--model", "squeezenet1_1", "--data", "synthetic", *size]
    command += ["--augment", "none", "--device", "cuda", "--output-dir", "too-large"]
    outcome = site.start(command, 120, {}).outcome()
    log = site.folder / "too-large.log"
    log.write_text(outcome.output, encoding="utf-8")
    lines = [line for line in outcome.output.splitlines() if re.search(r"(?i)memory", line)]
    if outcome.code is None or outcome.code == 0:
        raise Failed(f"exit code {outcome.code}, though it cannot fit; {log}")
    if "Traceback" in outcome.output or not lines:
        raise Failed(f"a traceback, or no word about memory; {log}")
    return lines[-1].strip(), {"exit_code": outcome.code}


def mpirun(site: Site) -> Seen:
    """Train on two ranks that mpirun has started."""
    site.needs_ranks(2)
    program = shutil.which("mpirun", path=f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise NotApplicable("there is no mpirun")
    flags = ["--allow-run-as-root"] * (os.geteuid() == 0) + ["--oversubscribe", "--bind-to", "none"]
    passed = [word for name in site.machine.variables for word in ("-x", name)]
    command = [program, *flags, *passed, "-np", "2", HVD_TRAIN, "train", "digits", "--device", "cuda", "--epochs", "1"]
    output = site.run("mpirun", [*command, "--output-dir", "under-mpirun"])
    if "2 ranks on cuda" not in output:
        raise Failed(f"the ranks did not find each other; {site.folder / 'mpirun.log'}")
    return "2 ranks on cuda have trained an epoch", {}
