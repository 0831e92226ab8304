"""`hvd-train doctor`: what a machine or a cluster can do."""

import dataclasses
import json
from argparse import Namespace

from hvd_train.console import printable, show
from hvd_train.launch import hosts as host_files


def doctor(options: Namespace) -> int:
    """Print the findings; return 1 if something is broken, else 0.

    Raises UsageError for wrong hosts.
    """
    listed = host_files.named(options.hosts)
    from rich.console import Console  # slow to import, like the doctor

    from hvd_train.doctor import cluster, machine

    with Console(stderr=True).status("examining"):
        findings = cluster.examine(listed) if listed else machine.examine()
    names = {
        kind: ", ".join(it.name for it in findings if it.verdict == kind)
        for kind in ("broken", "warning")
    }
    verdict = f"Broken: {names['broken']}." if names["broken"] else "Nothing is broken."
    if names["warning"]:
        verdict += f" Warnings: {names['warning']}."
    if options.json:
        report = {
            "ok": not names["broken"],
            "verdict": verdict,
            "findings": [dataclasses.asdict(it) for it in findings],
        }
        print(json.dumps(report, indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            show(printable(f"{finding.verdict:<9}{finding.name:<{width}}  {finding.what}"))
            if finding.todo:
                show(printable(f"{'':{width + 11}}-> {finding.todo}"))
        show(verdict)
    return 1 if names["broken"] else 0
