"""What was skipped is said in one line at the end, and in CI nothing is skipped for want of a program.

`python3 tests/support/skips.py` prints the packages to install so that no test is: standard library only.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable

# In CI these are there, or are installed if they can be; Slurm, nftables, container engines, GPUs need not be.
PROGRAMS = {
    "chromium": "chromium",
    "ip": "iproute2",
    "shellcheck": "shellcheck",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
    "zsh": "zsh",
}
STRICT = "HVD_TRAIN_NO_SKIPS"  # "1": a test that is skipped for want of one of them is a failure
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing_packages() -> list[str]:
    """Return the packages of the programs that this machine lacks."""
    return [
        package
        for name, package in PROGRAMS.items()
        if shutil.which(name) is None and shutil.which(name, path=_PATH) is None
    ]


def summary(reasons: Iterable[str]) -> str:
    """Return a line on the tests that were skipped, by the reason of each, the most frequent one first."""
    counted = Counter(reasons).most_common()
    return "skipped: " + ", ".join(f"{count} test{'s'[: count > 1]} ({reason})" for reason, count in counted)


def for_want_of_a_program(reason: str) -> bool:
    """Return whether the reason of a skip names a package that CI is to install."""
    match = re.search(r"apt(?:-get)? install ([a-z0-9 .+-]+)", reason)
    return match is not None and any(package in PROGRAMS.values() for package in match[1].split())


if __name__ == "__main__":
    print(*missing_packages())
