"""All benchmarks, one after the other, and docs/benchmarks.md: `make bench`; the ratios alone: `make bench-quick`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.record import RECORDS

# In the order of the page. Those of clusters make network namespaces, as root.
FULL = {
    "speed": "speed",
    "input": f"input --json {RECORDS}/input.json",
    "wire": f"wire --json {RECORDS}/wire.json",
    "commits": "ready commits",
    "elastic": "ready elastic --turns 20",
    "recovery": "recovery",
    "startup": f"startup --json {RECORDS}/startup.json",
    "order": f"order --json {RECORDS}/order.json",
}
# Nothing is recorded: a few turns show the ratio, not its interval.
QUICK = ["speed --quick", "input --images 40 --turns 3", "startup --turns 1", "order"]


def main() -> int:
    """Run them; how many failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the ratios, in five minutes; no record, no page")
    parser.add_argument("--only", nargs="+", choices=FULL, default=list(FULL), help="of the full ones")
    options = parser.parse_args()
    failed = 0
    for line in QUICK if options.quick else [FULL[name] for name in options.only]:
        print(f"\n== python -m benchmarks.{line}", flush=True)
        failed += subprocess.run([sys.executable, "-m", *f"benchmarks.{line}".split()], check=False).returncode != 0
    if not options.quick:
        failed += subprocess.run([sys.executable, "-m", "benchmarks.page"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
