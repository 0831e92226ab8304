"""What the stand-in's own tests play on it, each in its own process: python -m tests.fake_gpu.plays NAME ARGUMENTS.

Each play prints what it has seen as one line of JSON. The calls are CUDA's and NCCL's, without torch.
"""

import ctypes
import itertools
import json
import sys
import time
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

LIBRARY = ctypes.CDLL(None)  # it has been preloaded
SIZE, BUSY_MS = 1000, 500


def call(name: str, *arguments: Any) -> None:
    error = getattr(LIBRARY, name)(*arguments)
    assert error == 0, f"{name}: {error}"


def new_stream() -> c_void_p:
    stream = c_void_p()
    call("cudaStreamCreateWithPriority", byref(stream), 0, 0)
    return stream


def recorded(stream: c_void_p) -> c_void_p:
    """Return a new event that the stream records."""
    event = c_void_p()
    call("cudaEventCreateWithFlags", byref(event), 0)
    call("cudaEventRecord", event, stream)
    return event


class Memory:
    """Numbers on the current device; new memory if there are no values."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        self.at, self._like = c_void_p(), np.ones(SIZE) if values is None else values
        call("cudaMalloc", byref(self.at), c_size_t(self._like.nbytes))
        if values is not None:
            call("cudaMemcpyAsync", self.at, c_void_p(values.ctypes.data), c_size_t(values.nbytes), c_int(1), None)
            call("cudaDeviceSynchronize")

    def copy_from(self, other: "Memory", stream: c_void_p) -> None:
        call("cudaMemcpyAsync", self.at, other.at, c_size_t(self._like.nbytes), c_int(4), stream)

    def values(self) -> np.ndarray:
        """Return what is there now, without a wait."""
        result = np.empty_like(self._like)
        ctypes.memmove(result.ctypes.data, self.at, self._like.nbytes)
        return result

    def is_nan(self) -> bool:
        return bool(np.isnan(self.values()).all())


IN_PROGRESS = 7  # ncclInProgress


class UniqueId(ctypes.Structure):
    """As in nccl.h."""

    _fields_ = (("internal", ctypes.c_char * 128),)


def communicator(name: str, size: int, rank: int) -> c_void_p:
    handle, config = c_void_p(), (ctypes.c_int * 32)()  # of which the stand-in reads `blocking`, which is 0
    nccl(
        handle, "ncclCommInitRankConfig", byref(handle), size, UniqueId(f"/fake_gpu-test-{name}".encode()), rank, config
    )
    return handle


def nccl(handle: c_void_p, function: str, *arguments: Any) -> None:
    """Call a function of NCCL and wait until it is done."""
    result = c_int(getattr(LIBRARY, function)(*arguments))
    while result.value == IN_PROGRESS:
        LIBRARY.ncclCommGetAsyncError(handle, byref(result))
    assert result.value == 0, f"{function}: {result.value}"


def all_reduce(memory: Memory, handle: c_void_p, stream: c_void_p, operation: int = 0) -> None:
    like = memory.values()
    kind = 6 if like.dtype == np.float16 else 7
    nccl(handle, "ncclAllReduce", memory.at, memory.at, c_size_t(like.size), kind, operation, handle, stream)


def order() -> Any:
    """Two hundred copies on a stream, each from the last one's target, with events between them."""
    stream = new_stream()
    chain = [Memory(np.arange(float(SIZE))), *(Memory() for _ in range(200))]
    events = []
    for source, target in itertools.pairwise(chain):
        target.copy_from(source, stream)
        events.append(recorded(stream))
    ready = [False]
    while not all(ready):
        ready = [LIBRARY.cudaEventQuery(event) == 0 for event in reversed(events)][::-1]
        assert ready == sorted(ready, reverse=True), "an event was ready before one that was recorded earlier"
    return chain[-1].values().tolist() == list(range(SIZE))


def event() -> Any:
    """An event behind a busy stream is not ready, a stream waits for it, and the host can."""
    first, second = new_stream(), new_stream()
    source, middle, target = Memory(np.ones(SIZE)), Memory(), Memory()
    LIBRARY.fake_gpu_busy(first, BUSY_MS)
    middle.copy_from(source, first)
    done = recorded(first)
    call("cudaStreamWaitEvent", second, done, 0)
    target.copy_from(middle, second)
    early = LIBRARY.cudaEventQuery(done), LIBRARY.cudaStreamQuery(second), target.is_nan()
    call("cudaStreamSynchronize", second)
    return early, LIBRARY.cudaEventQuery(done), target.values().tolist() == [1.0] * SIZE


def race(kind: str) -> Any:
    """Two streams use the same bytes; in `fine` the second one waits, and in `seen` the host does."""
    first, second = new_stream(), new_stream()
    source, shared, target = Memory(np.ones(SIZE)), Memory(), Memory()
    shared.copy_from(source, first)
    if kind in ("late", "fine"):
        call("cudaStreamWaitEvent", second, recorded(first), 0)
    if kind == "late":  # the wait is for what was recorded before
        shared.copy_from(source, first)
    if kind == "seen":
        call("cudaStreamSynchronize", first)
    if kind == "write":
        shared.copy_from(source, second)
    else:
        target.copy_from(shared, second)
    call("cudaDeviceSynchronize")
    return True


def freed(kind: str) -> Any:
    """Memory is freed while another stream may use it (`early`), is freed twice, or is used afterwards."""
    owner, other = new_stream(), new_stream()
    source, shared, target = Memory(np.ones(SIZE)), Memory(), Memory()
    is_new_nan = shared.is_nan()
    shared.copy_from(source, owner)
    call("cudaStreamWaitEvent", other, recorded(owner), 0)
    target.copy_from(shared, other)
    if kind != "early":
        call("cudaStreamSynchronize", other)
    call("cudaFree", shared.at)
    if kind == "used":
        target.copy_from(shared, owner)
    if kind == "twice":
        LIBRARY.cudaFree(shared.at)
    call("cudaDeviceSynchronize")
    return is_new_nan, shared.is_nan()


def absent() -> Any:
    return LIBRARY.cudaGraphDestroy(None)


def collective(name: str, rank: str) -> Any:
    """Sums over several pieces, and a mean."""
    handle, stream = communicator(name, 3, int(rank)), new_stream()
    seen = []
    for kind, operation, total in (("f4", 0, 6), ("f2", 0, 6), ("f4", 4, 2)):
        memory = Memory((np.arange(700_000) % 7 * (int(rank) + 1)).astype(kind))
        all_reduce(memory, handle, stream, operation)
        call("cudaStreamSynchronize", stream)
        seen.append(bool((memory.values() == np.arange(700_000) % 7 * total).all()))
    call("ncclCommDestroy", handle)
    return seen


def abort(name: str, rank: str) -> Any:
    """Rank 1 stops halfway through a sum of 16 pieces, and rank 0 gives up when something has come."""
    handle, stream = communicator(name, 2, int(rank)), new_stream()
    memory = Memory(np.ones(16 << 18, dtype=np.float32))
    all_reduce(memory, handle, stream)
    done = recorded(stream)
    while memory.values()[0] != 2:
        time.sleep(0.001)
    if rank == "1":
        return None  # the process ends in the middle of its sum
    early = LIBRARY.cudaEventQuery(done)
    call("ncclCommAbort", handle)
    call("cudaEventSynchronize", done)
    values, error = memory.values(), LIBRARY.ncclCommGetAsyncError(handle, byref(c_int()))
    return early, int((values == 2).sum()), int((values == 1).sum()), error


def operators() -> Any:
    """Return which groups of torch's operators differ from the CPU's."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(1)  # as operators.py has it: another number gives other sums

    def results(device: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        images = torch.randn(4, 3, 8, 8).to(device)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)  # as on a GPU
        for _ in range(3):
            F.cross_entropy(model(images), torch.arange(4).to(device)).backward()
            optimizer.step()
        views = images.clone()
        views[:, 1].zero_()  # not all bytes from the first to the last are its own
        views.permute(3, 0, 2, 1)[0, 1].mul_(torch.tensor(3.0).to(device))
        out = torch.empty(0, device=device)
        torch.add(images, 1, out=out)  # has another size
        last = images.contiguous(memory_format=torch.channels_last)
        assert (last + 1).is_contiguous(memory_format=torch.channels_last)
        return {
            "training": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
            "views": views,
            "out": out,
            "formats": images.half().float() + images.bfloat16().float() + (images > 0).float(),
            "layout": F.interpolate(last, size=(5, 5), mode="bilinear", antialias=True),
        }

    on_gpu, on_cpu = results("cuda"), results("cpu")
    return [name for name, host in on_cpu.items() if not torch.equal(on_gpu[name].cpu(), host)]


def side_stream(kind: str) -> Any:
    """A sum on a side stream of what the default stream writes, and a late copy from pinned memory."""
    import torch

    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    x += 1
    if kind == "waits":
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = x.sum()
    side.synchronize()
    pinned = torch.ones(1000).pin_memory()
    LIBRARY.fake_gpu_busy(None, BUSY_MS)
    device = pinned.to("cuda", non_blocking=True)
    pinned[:500] = 2
    return total.item(), sorted(set(device.tolist()))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
