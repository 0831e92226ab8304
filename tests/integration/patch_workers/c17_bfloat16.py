"""C17: everything that Horovod does with tensors, with bfloat16; fails if anything is not as expected.

Numbers are any bits: subnormal, infinite and NaN as well. A sum of three ranks depends on the order of additions, so
there it is within a rounding of each; two have one sum. Rank 0 prints what is said where ranks differ in the type.
"""

import sys
from functools import reduce

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

hvd.init()
rank, size = hvd.rank(), hvd.size()


def bits(seed: int, count: int) -> torch.Tensor:
    """Any numbers of bfloat16; those of three ranks or more are moderate, so that no partial sum is infinite."""
    generator = torch.Generator().manual_seed(seed)
    if size > 2:
        return torch.randn(count, generator=generator).bfloat16()
    return torch.randint(-(2**15), 2**15, (count,), generator=generator).to(torch.int16).view(torch.bfloat16)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are the same numbers, NaN counting as one."""
    if found.dtype != torch.bfloat16 or found.shape != expected.shape:
        return False
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def summed(found: torch.Tensor, of_ranks: list[torch.Tensor], roundings: int) -> bool:
    """Whether this is the sum: of two ranks to the bit, of more within so many roundings."""
    if size == 2 and roundings == 1:
        return same(found, (of_ranks[0].float() + of_ranks[1].float()).bfloat16())
    exact = torch.stack(of_ranks).double()
    bound = ((1 + 2.0**-8) ** roundings - 1) * exact.abs().sum(0) + roundings * 2.0**-133
    return bool(((found.double() - exact.sum(0)).abs() <= bound).all())


failed = []
for count in (1, 7, 8, 1000, 300_001):
    of_ranks = [bits(number, count) for number in range(size)]
    mine = of_ranks[rank]
    if not summed(hvd.allreduce(mine.clone(), op=hvd.Sum, name=f"sum {count}"), of_ranks, size - 1):
        failed.append(f"sum of {count}")
    group = [mine.clone(), mine.float().nan_to_num(0, 1, 1), mine.clone()]
    first, _, second = hvd.grouped_allreduce(group, op=hvd.Sum, name=f"group {count}")
    if not (summed(first, of_ranks, size - 1) and summed(second, of_ranks, size - 1)):
        failed.append(f"group of {count}")
    for op, combined in ((hvd.Min, torch.minimum), (hvd.Max, torch.maximum), (hvd.Product, torch.mul)):
        finite = [numbers.nan_to_num(3, 3, -3) for numbers in of_ranks]
        expected = reduce(combined, finite)
        found = hvd.allreduce(finite[rank].clone(), op=op, name=f"{op} {count}")
        if op != hvd.Product or size == 2:
            right = same(found, expected)
        else:
            right = torch.allclose(found.double(), expected.double(), rtol=4 * 2.0**-8, atol=1e-30)
        if not right:
            failed.append(f"{combined.__name__} of {count}")
    generators = [torch.Generator().manual_seed(number) for number in range(size)]
    moderate = [torch.randn(count, generator=generator).bfloat16() for generator in generators]
    mean = hvd.allreduce(moderate[rank].clone(), op=hvd.Average, name=f"mean {count}")
    if not summed(mean, [numbers.double() / size for numbers in moderate], size):
        failed.append(f"mean of {count}")
    if not same(hvd.allgather(mine.view(1, -1), name=f"gather {count}"), torch.stack(of_ranks)):
        failed.append(f"gather of {count}")
    if not same(hvd.broadcast(mine, size - 1, name=f"broadcast {count}"), of_ranks[-1]):
        failed.append(f"broadcast of {count}")
    rows = torch.stack([bits(100 + rank * size + to, count) for to in range(size)])
    expected = torch.stack([bits(100 + number * size + rank, count) for number in range(size)])
    received = hvd.alltoall(rows, name=f"alltoall {count}")
    if not same(received[0] if isinstance(received, tuple) else received, expected):
        failed.append(f"alltoall of {count}")
    matrix = [torch.stack([numbers] * size) for numbers in moderate]
    part = hvd.reducescatter(matrix[rank].clone(), op=hvd.Sum, name=f"reducescatter {count}")
    if not summed(part[0], moderate, 2 * (size - 1)):
        failed.append(f"reducescatter of {count}")
sent, context = hvd.Compression.bf16.compress(torch.tensor([1.0 + 2.0**-8, 1e38]))
back = hvd.Compression.bf16.decompress(sent, context)
if sent.dtype != torch.bfloat16 or not torch.equal(back, torch.tensor([1.0, 1e38]).bfloat16().float()):
    failed.append("compression")
try:
    hvd.allreduce(torch.ones(3, dtype=torch.bfloat16 if rank == 0 else torch.float16), name="mismatched")
except HorovodInternalError as error:
    if rank == 0:
        print(error, flush=True)
hvd.shutdown()
sys.exit(f"wrong: {', '.join(failed)}" if failed else 0)
