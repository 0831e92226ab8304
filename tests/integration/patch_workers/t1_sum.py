"""T1: ranks meet and sum."""

import horovod.torch as hvd
import torch

hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
hvd.shutdown()
