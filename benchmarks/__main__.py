"""Run all benchmarks and write their records (`make bench`), or show the ratios only (`make bench-quick`).

python -m benchmarks             two hours on an idle machine; recovery needs root
python -m benchmarks --quick     less than five minutes; no record
python -m benchmarks --table     the records as Markdown tables, for docs/benchmarks.md
"""

import argparse
import json
import subprocess
import sys
import time

from benchmarks.turns import ENVIRONMENT, RECORDS, ROOT

QUICK = ["speed", "input", "ready commits", "ready elastic"]
FULL = [*QUICK, "recovery"]


def table() -> str:
    """Return a Markdown table of each record that holds comparisons."""
    parts = []
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        if "comparisons" in record:
            rows = [f"\n`{record['command']}`, {record['date']}, commit {record['commit']}; {path.relative_to(ROOT)}\n"]
            rows.append("| comparison | median (95% interval) | aim | verdict |\n|---|---|---|---|")
            for row in record["comparisons"]:
                low, high = row["interval"]
                value = f"{row['median']:.3g} ({low:.3g} to {high:.3g})"
                rows.append(f"| {row['comparison']} | {value} | {row.get('aim', '')} | {row.get('verdict', '')} |")
            parts.append("\n".join(rows))
    return "\n".join(parts)


def main() -> int:
    """Run the benchmarks and return the number of those that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="show the ratios only")
    parser.add_argument("--table", action="store_true", help="print the records that are there, and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(table())
        return 0
    failed = 0
    for program in QUICK if options.quick else FULL:
        line = f"{sys.executable} -m benchmarks.{program}{' --quick' if options.quick else ''}"
        print(f"\n== {line}", flush=True)
        began = time.monotonic()
        failed += subprocess.run(line.split(), cwd=ROOT, env=ENVIRONMENT, check=False).returncode != 0
        print(f"== {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
