"""T1: ranks of two hosts in two process sets; prints what each rank knows of its place, and its sums."""

import os

import horovod.torch as hvd
import torch

odd, others = hvd.ProcessSet([1, 3, 4]), hvd.ProcessSet([0, 2])
hvd.init(process_sets=[odd, others])
mine = odd if odd.included() else others
value = torch.tensor([10.0 ** hvd.rank()])
sums = [int(hvd.allreduce(value, op=hvd.Sum, name="all")), int(hvd.allreduce(value, op=hvd.Sum, process_set=mine))]
place = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
os.write(1, f"PLACE {place} SUMS {sums}\n".encode())  # at once: several write
hvd.shutdown()
