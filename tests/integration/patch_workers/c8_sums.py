"""C8: sums of many lengths, types and operations over all ranks, compared with those in the order of the ranks.

Fails if one of them is not as expected, or goes through shared memory although SHARED is not 1, or the reverse.
NO_ROOM=RANK: that rank may not make files of any length, nor memory that counts as one.
"""

import os
import resource
import sys
from functools import reduce
from pathlib import Path

import horovod.torch as hvd
import torch

rank = next(os.environ[name] for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
if os.environ.get("NO_ROOM") == rank:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
hvd.init()
# Now: whichever rank shuts down first ends it for all.
shared = "/memfd:horovod-" in Path("/proc/self/maps").read_text()
LENGTHS = [0, 1, 2, 7, 1024, 1025, 2048, 2049, 131_071, 131_072, 131_073, 400_001, 3_000_000]  # 8 KB, 512 KB and around
OPERATIONS = {hvd.Sum: torch.add, hvd.Min: torch.minimum, hvd.Max: torch.maximum, hvd.Product: torch.mul}
wrong = 0
for kind in (torch.float32, torch.float16, torch.float64, torch.int32, torch.int64):
    for length in LENGTHS:
        of_ranks = [
            (torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 3).to(kind)
            for rank in range(hvd.size())
        ]
        for op, add in OPERATIONS.items():
            expected = reduce(add, of_ranks)
            found = hvd.allreduce(of_ranks[hvd.rank()], op=op, name=f"{kind}.{length}.{op}")
            wrong += not torch.equal(found, expected)
parts = [torch.full((1 + 3000 * number,), float(hvd.rank() + number)) for number in range(40)]
sums = hvd.grouped_allreduce(parts, op=hvd.Sum, name="group")
ranks = sum(range(hvd.size()))
wrong += sum(not torch.all(found == ranks + hvd.size() * number) for number, found in enumerate(sums))
hvd.shutdown()
if wrong or shared != (os.environ["SHARED"] == "1"):
    sys.exit(f"{wrong} sums are wrong; {shared=}")
