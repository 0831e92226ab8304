"""L7: a rank prints more than a pipe holds, and leaves a file when it is done."""

import sys
from pathlib import Path

for number in range(2000):
    print(f"line {number:90}", flush=True)
    print(f"error {number:90}", file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text("done")
