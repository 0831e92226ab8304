"""L3: one line on each stream from each rank."""

import os
import sys

rank = os.environ["HOROVOD_RANK"]
print(f"out of {rank}")
print(f"error of {rank}", file=sys.stderr)
