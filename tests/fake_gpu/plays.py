"""What tests play on the stand-in, each in a process of its own: python -m tests.fake_gpu.plays NAME ARGUMENTS.

Each play prints what it has seen as one line of JSON.
"""

import ctypes
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fake_gpu.calls import CUDA, MAX, MEAN, Communicator, CudaError, Memory, cuda, held, new_event, new_stream

SIZE = 1000


def order() -> Any:
    """Two hundred copies on a stream, each from the last one's target, with events between them."""
    stream = new_stream()
    chain = [Memory.holding(np.arange(SIZE, dtype=np.int64)), *(Memory(np.zeros(SIZE, np.int64)) for _ in range(200))]
    events = []
    for source, target in itertools.pairwise(chain):
        target.copy_from(source, stream)
        events.append(new_event())
        cuda("cudaEventRecord", events[-1], stream)
    ready = [False]
    while not all(ready):
        ready = [CUDA.cudaEventQuery(event) == 0 for event in reversed(events)][::-1]
        assert ready == sorted(ready, reverse=True), "an event was ready before one that was recorded earlier"
    return chain[-1].values().tolist() == list(range(SIZE))


def event() -> Any:
    """An event behind a held stream is not ready, a stream waits for it, and the host can."""
    first, second, done = new_stream(), new_stream(), new_event()
    source, middle, target = Memory.holding(np.ones(SIZE)), Memory(np.ones(SIZE)), Memory(np.ones(SIZE))
    release = held(first)
    middle.copy_from(source, first)
    cuda("cudaEventRecord", done, first)
    cuda("cudaStreamWaitEvent", second, done, 0)
    target.copy_from(middle, second)
    early = CUDA.cudaEventQuery(done), CUDA.cudaStreamQuery(second), bool(np.isnan(target.values()).all())
    release()
    cuda("cudaStreamSynchronize", second)
    return early, CUDA.cudaEventQuery(done), target.values().tolist() == [1.0] * SIZE


def race(kind: str) -> Any:
    """Two streams use the same bytes, and only in `fine` the second one waits."""
    first, second, done = new_stream(), new_stream(), new_event()
    source, shared, target = Memory.holding(np.ones(SIZE)), Memory(np.ones(SIZE)), Memory(np.ones(SIZE))
    shared.copy_from(source, first)
    if kind == "read":
        target.copy_from(shared, second)
    elif kind == "write":
        shared.copy_from(source, second)
    elif kind == "late":  # what is recorded after the wait is not waited for
        cuda("cudaEventRecord", done, first)
        cuda("cudaStreamWaitEvent", second, done, 0)
        shared.copy_from(source, first)
        target.copy_from(shared, second)
    elif kind == "fine":
        cuda("cudaEventRecord", done, first)
        cuda("cudaStreamWaitEvent", second, done, 0)
        target.copy_from(shared, second)
    elif kind == "seen":
        cuda("cudaStreamSynchronize", first)
        target.copy_from(shared, second)
    cuda("cudaDeviceSynchronize")
    return True


def freed(kind: str) -> Any:
    """Memory is given back while a stream may use it (`early`), told of it or not, or is used afterwards."""
    owner, other, done = new_stream(), new_stream(), new_event()
    source, shared, target = Memory.holding(np.ones(SIZE)), Memory(np.ones(SIZE)), Memory(np.ones(SIZE))
    is_new_nan = bool(np.isnan(shared.values()).all())
    shared.copy_from(source, owner)
    cuda("cudaEventRecord", done, owner)
    cuda("cudaStreamWaitEvent", other, done, 0)
    target.copy_from(shared, other)
    if kind == "told":
        CUDA.fake_gpu_tell(0, other, shared.at)
    if kind in ("used", "twice"):
        cuda("cudaStreamSynchronize", other)
    shared.free()
    if kind == "used":
        target.copy_from(shared, owner)
    if kind == "twice":
        CUDA.cudaFree(shared.at)
    cuda("cudaDeviceSynchronize")
    return is_new_nan, bool(np.isnan(shared.values()).all())


def errors() -> Any:
    seen = [CUDA.fake_gpu_launch(0, None) for _ in range(3)]
    return seen, CUDA.cudaDeviceSynchronize(), CUDA.cudaGetLastError(), CUDA.cudaGetLastError()


def last_error() -> Any:
    """An error stays for the thread until it is asked for, once."""
    wrong = CUDA.cudaSetDevice(77)
    return wrong, CUDA.cudaPeekAtLastError(), CUDA.cudaGetLastError(), CUDA.cudaGetLastError()


def memory(size: str) -> Any:
    """Pieces of this many bytes until there is none."""
    pieces = []
    try:
        while True:
            pieces.append(Memory(np.empty(int(size), np.uint8)))
    except CudaError as error:
        count = len(pieces)
        pieces.pop().free()
        pieces.append(Memory(np.empty(int(size), np.uint8)))
        return count, error.args[0]


def visible() -> Any:
    count = ctypes.c_int()
    error = CUDA.cudaGetDeviceCount(ctypes.byref(count))
    assert error == (0 if count.value else 100)
    text = ctypes.create_string_buffer(20)
    found = []
    for device in range(count.value):
        cuda("cudaDeviceGetPCIBusId", text, 20, device)
        found.append(text.value.decode())
    return found


def collective(name: str, rank: str, size: str) -> Any:
    """All that NCCL sums, on every rank; numbers over several pieces."""
    communicator, stream = Communicator(name, int(size), int(rank)), new_stream()
    results = []
    for kind in (np.float32, np.float16, np.int64):
        memory = Memory.holding((np.arange(700_000) % 7 * (int(rank) + 1)).astype(kind))
        assert communicator.all_reduce(memory, stream) == 0
        cuda("cudaStreamSynchronize", stream)
        total = int(size) * (int(size) + 1) // 2
        results.append(bool((memory.values() == np.arange(700_000) % 7 * total).all()))
    others = []
    for operation in (MAX, MEAN):
        memory = Memory.holding(np.array([int(rank), -int(rank)], dtype=np.float32))
        communicator.all_reduce(memory, stream, operation)
        cuda("cudaStreamSynchronize", stream)
        others.append(memory.values().tolist())
    return results, others, communicator.destroy(), CUDA.fake_gpu_communicators()


def abort(name: str, rank: str) -> Any:
    """Rank 1 stops halfway through a sum of 16 pieces, and rank 0 gives up when something has come."""
    communicator, stream, done = Communicator(name, 2, int(rank)), new_stream(), new_event()
    memory = Memory.holding(np.ones(16 << 18, dtype=np.float32))
    communicator.all_reduce(memory, stream)
    cuda("cudaEventRecord", done, stream)
    wait(lambda: memory.values()[0] == 2)
    if rank == "1":
        return True  # the process ends in the middle of its sum
    time.sleep(0.3)
    early = CUDA.cudaEventQuery(done)
    assert communicator.abort() == 0
    cuda("cudaEventSynchronize", done)
    values = memory.values()
    return early, int((values == 2).sum()), int((values == 1).sum())


def init(name: str, rank: str) -> Any:
    """Rank 1 dies in it, as ordered; the other one gives up."""
    communicator = Communicator(name, 2, int(rank), blocking=False)
    first, error = communicator.result, communicator.error
    time.sleep(0.3)
    later = communicator.error
    return first, error, later, communicator.abort(), CUDA.fake_gpu_communicators()


def asynchronous(name: str, rank: str) -> Any:
    """The second sum goes wrong on rank 0, as ordered: its event comes with the abort."""
    communicator, stream, done = Communicator(name, 2, int(rank), blocking=False), new_stream(), new_event()
    wait(lambda: communicator.error != 7)  # ncclInProgress
    memory = Memory.holding(np.ones(SIZE, dtype=np.float32))
    communicator.all_reduce(memory, stream)
    cuda("cudaStreamSynchronize", stream)
    if rank == "1":
        return communicator.abort()
    communicator.all_reduce(memory, stream)
    cuda("cudaEventRecord", done, stream)
    wait(lambda: communicator.error != 0)
    seen = communicator.error, CUDA.cudaEventQuery(done)
    communicator.abort()
    cuda("cudaEventSynchronize", done)
    return seen, communicator.error  # asked of a communicator that is gone


def devices(name: str) -> Any:
    """One process with two devices and a communicator over both."""
    CUDA.ncclGroupStart()
    ranks = []
    for rank in range(2):
        cuda("cudaSetDevice", rank)
        ranks.append(Communicator(name, 2, rank))
    assert CUDA.ncclGroupEnd() == 0
    parts = []
    for rank, communicator in enumerate(ranks):
        cuda("cudaSetDevice", rank)
        stream, part = new_stream(), Memory.holding(np.full(SIZE, rank + 1.0, dtype=np.float32))
        parts.append((part, stream))
        communicator.all_reduce(part, stream)
    for _, stream in parts:
        cuda("cudaStreamSynchronize", stream)
    return [float(part.values().sum()) for part, _ in parts]


def wait(condition: Callable[[], bool]) -> None:
    """Until it holds, for a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
