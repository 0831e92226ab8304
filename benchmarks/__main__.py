"""Run all benchmarks and write their records (`make bench`), or show the ratios only (`make bench-quick`).

python -m benchmarks             two hours on an idle machine; recovery needs root
python -m benchmarks --quick     less than five minutes; no record
"""

import subprocess
import sys
import time

from benchmarks.turns import ENVIRONMENT, ROOT, parser

QUICK = ["speed", "input", "ready commits", "ready elastic"]
FULL = [*QUICK, "recovery"]


def main() -> int:
    """Run the benchmarks and return the number of those that failed."""
    quick, failed = parser(__doc__).parse_args().quick, 0
    for program in QUICK if quick else FULL:
        line = f"{sys.executable} -m benchmarks.{program}{' --quick' if quick else ''}"
        print(f"\n== {line}", flush=True)
        began = time.monotonic()
        failed += subprocess.run(line.split(), cwd=ROOT, env=ENVIRONMENT, check=False).returncode != 0
        print(f"== {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
