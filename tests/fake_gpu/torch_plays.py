"""What tests play on the stand-in with torch: python -m tests.fake_gpu.torch_plays NAME ARGUMENTS.

Each play prints what it has seen as one line of JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fake_gpu.calls import held


def operators() -> Any:
    torch.set_num_threads(1)  # as operators.py has it: another number gives other sums
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 8, 8, generator=generator)

    def network(on: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
        model.to(on(images).device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)  # as on a GPU
        for _ in range(3):
            F.cross_entropy(model(on(images)), on(torch.arange(4))).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def views(on: Callable[[Tensor], Tensor]) -> Tensor:
        x = on(images).clone()
        x[:, 1].zero_()  # not all bytes from the first to the last are its own
        x[..., ::2] += 1
        x.permute(3, 0, 2, 1)[0, 1].mul_(on(torch.tensor(3.0)))
        return x

    def results(on: Callable[[Tensor], Tensor]) -> Tensor:
        out = torch.empty(0, device=on(images).device)
        torch.add(on(images), 1, out=out)  # has another size
        return torch.cat([out.flatten(), on(images).topk(2).values.flatten(), on(images).std(0).flatten()])

    def groups(on: Callable[[Tensor], Tensor]) -> Tensor:
        parts = [on(part).clone() for part in images]
        torch._foreach_add_(parts, [on(part) for part in images], alpha=2)
        torch._foreach_copy_(parts[:1], parts[1:2])
        return torch.stack(parts)

    def types(on: Callable[[Tensor], Tensor]) -> Tensor:
        x = on(images)
        return torch.cat([x.half().float().flatten(), x.bfloat16().float().flatten(), (x > 0).float().flatten()])

    def layout(on: Callable[[Tensor], Tensor]) -> Tensor:
        x = on(images).contiguous(memory_format=torch.channels_last)
        assert (x + 1).is_contiguous(memory_format=torch.channels_last)
        return F.interpolate(x, size=(5, 5), mode="bilinear", antialias=True)

    def dropout(on: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(2)
        return F.dropout(on(images), 0.5)

    wrong = []
    for name, operation in list(locals().items()):
        if callable(operation) and not isinstance(operation, Tensor):
            host, device = operation(lambda x: x), operation(lambda x: x.cuda())
            if not (device.is_cuda and torch.equal(device.cpu(), host)):
                wrong.append(name)
    return wrong


def stream(kind: str) -> Any:
    """A sum on a side stream of what the default stream writes; only `waits` and `told` wait for it."""
    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    x += 1
    if kind != "forgets":
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = x.sum()
    if kind == "told":
        x.record_stream(side)
    if kind in ("told", "untold"):
        del x
    side.synchronize()
    return total.item()


def copies() -> Any:
    """A late copy from pinned memory takes what is in it by then, and its memory is not given to others before."""
    pinned = torch.ones(1000).pin_memory()
    release = held(None)
    device = pinned.to("cuda", non_blocking=True)
    pinned[:500] = 2
    address = pinned.data_ptr()
    del pinned
    again = torch.zeros(1000).pin_memory()
    release()
    result = device.cpu()
    return sorted(set(result.tolist())), address == again.data_ptr()


def errors() -> Any:
    """What torch makes of errors to order."""
    seen = []
    for size in (10, 10, 10**9):
        try:
            torch.ones(size, device="cuda")
            seen.append("fine")
        except torch.OutOfMemoryError:
            seen.append("out of memory")
        except RuntimeError as error:
            seen.append(str(error))
    return seen


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
