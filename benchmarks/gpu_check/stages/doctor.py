"""What the doctor says, and which libcuda the loader finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.findings import Failed, Finding, NotApplicable, Seen, checked
from benchmarks.gpu_check.site import PROGRAMS, Site


def checks(site: Site) -> Iterator[Finding]:
    """Ask the doctor, and look for libcuda."""
    yield checked("libcuda", libcuda)
    yield from doctor(site)


def libcuda() -> Seen:
    """Find the driver's library as the loader would: Horovod needs `libcuda.so.1`, its build `libcuda.so`."""
    folders = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if name]
    found = [str(path) for folder in folders for path in sorted(folder.glob("libcuda.so*"))]
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found += re.findall(r"=> (\S*/libcuda\.so\S*)", listed)
    if not any(path.endswith("libcuda.so.1") for path in found):
        raise Failed(f"no libcuda.so.1; found: {', '.join(found) or 'nothing'}")
    return ", ".join(found), {}


def doctor(site: Site) -> Iterator[Finding]:
    """Yield the doctor's findings: what it calls broken has failed, warnings are passed on in its words."""
    options = ["--quick"] if site.short else ["--hosts", str(site.machine.host_file)] if site.machine.host_file else []
    log = site.folder / "doctor.json"
    try:
        outcome = site.start([str(PROGRAMS / "hvd-train"), "doctor", "--json", *options], 300, {}).outcome()
    except NotApplicable as reason:
        yield Finding("doctor", "not applicable", str(reason))
        return
    log.write_text(outcome.output, encoding="utf-8")
    try:
        listed = json.loads(outcome.output[outcome.output.index("{") :])["findings"]
    except ValueError:
        yield Finding("doctor", "failed", f"exit code {outcome.code}, and no answer; {log}")
        return
    for one in listed:
        warned = "a warning: " * (one["verdict"] == "warning")
        todo = f"; {one['todo']}" if one["todo"] else ""
        yield Finding(one["name"], "failed" if one["verdict"] == "broken" else "passed", warned + one["what"] + todo)
