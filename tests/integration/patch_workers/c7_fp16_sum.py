"""C7: adds a million pairs of fp16 numbers over two ranks; fails if the sums are not those of IEEE 754."""

import sys

import horovod.torch as hvd
import torch

hvd.init()
bits = torch.randint(-(2**15), 2**15, (2, 2**20 + 5), generator=torch.Generator().manual_seed(0)).to(torch.int16)
pairs = bits.view(torch.float16)
expected = (pairs[0].float() + pairs[1].float()).half()
found = hvd.allreduce(pairs[hvd.rank()].clone(), op=hvd.Sum, name="sum")
wrong = (found != expected) & ~(found.isnan() & expected.isnan())
hvd.shutdown()
sys.exit(f"{int(wrong.sum())} sums are wrong" if wrong.any() else 0)
