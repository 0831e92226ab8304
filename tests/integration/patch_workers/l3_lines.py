"""L3: each rank prints one line on each stream."""

import os
import sys

rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
print(f"out of {rank}")
print(f"error of {rank}", file=sys.stderr)
