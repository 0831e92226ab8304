"""`hvd-train doctor`: what this machine, this build of Horovod and a cluster can do."""

from __future__ import annotations

USAGE = """\
  doctor                   what this machine and this build of Horovod can do
"""


def run(arguments: list[str]) -> int:
    """Examine the machine or the cluster, print the findings and return 1 where something is broken, else 0."""
    from hvd_train.doctor.doctor import main

    return main(arguments)
