"""Ranks for tests of Horovod's patches: `ranks.py NAME` runs a function, `ranks.py world
SIZE NAME` on Gloo ranks.
"""

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import reduce
from math import isclose
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import horovod.torch as hvd
import psutil
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, HostInfo, get_host_assignments
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.world.horovod_world import HorovodWorld, _squares_at


def world() -> None:
    """Run local ranks over Gloo, and print `EXIT [codes by rank]`.

    Unlike horovodrun, let ranks outlive a failed one.
    """
    size = int(sys.argv[2])
    worker = sys.argv[3]
    slots = get_host_assignments([HostInfo("localhost", size)], size)
    server = RendezvousServer(0)
    common = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(slots)
    processes = []
    for slot in slots:
        own = {name: str(value) for name, value in (common | create_slot_env_vars(slot)).items()}
        command = [sys.executable, __file__, worker]
        processes.append(subprocess.Popen(command, env=os.environ | own, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + 180
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        print(f"EXIT {codes}", flush=True)
    finally:
        for process in processes:
            process.kill()


def c1_connections() -> None:
    """Print the number of connections to a peer that are open after shutdown()."""
    hvd.init()
    hvd.allreduce(torch.ones(1), name="warm-up")
    folder = Path(os.environ["FOLDER"])
    rank = hvd.rank()
    hvd.shutdown()
    deadline = time.monotonic() + 60
    while (connections := established()) and time.monotonic() < deadline:
        time.sleep(0.05)
    # in one piece, as both ranks write into one pipe
    os.write(1, f"OPEN {len(connections)}\n".encode())
    (folder / str(rank)).touch()
    # the peer's end must not close ours
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline + 5:
        time.sleep(0.05)
    os._exit(0)


def established() -> list[Any]:
    """Return the connections of this process."""
    return [c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]


def c2_silent_peer() -> None:
    """Rank 1 stops (SIGSTOP); the operation of rank 0 fails in time."""
    hvd.init()
    pids = hvd.allgather_object(os.getpid(), name="pids")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    start = time.monotonic()
    code = 3
    try:
        hvd.allreduce(torch.ones(1000), name="with a silent peer")
    except HorovodInternalError:
        code = 0 if 1.5 <= time.monotonic() - start < 120 else 4
    os.kill(pids[1], signal.SIGKILL)
    os._exit(code)


def become_rank_0(size: int, *, elastic: bool = False) -> RendezvousServer:
    """Start a rendezvous, and give this process the environment of its rank 0."""
    server = RendezvousServer(0)
    # a driver that has no rank for this worker
    driver = Mock(get_slot_info=lambda host, slot: INVALID_SLOT_INFO)
    port = server.start(create_rendezvous_handler(driver)) if elastic else server.start()
    slots = get_host_assignments([HostInfo("localhost", size)], size)
    server.init(slots)
    env = create_run_env_vars("127.0.0.1", ["lo"], port, elastic=elastic)
    os.environ.update({name: str(value) for name, value in env.items()})
    os.environ.update(create_slot_env_vars(slots[0]))
    return server


def c3_failed_init() -> None:
    """A peer never comes: init() raises without ending the process, and a second init() works."""
    server = become_rank_0(2)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "2"
    try:
        hvd.init()
    except ValueError as error:
        print("RAISED", error, flush=True)
    del server, os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]  # a world of one
    os.environ["HOROVOD_SIZE"] = os.environ["HOROVOD_LOCAL_SIZE"] = "1"
    hvd.init()
    print("SUM", hvd.allreduce(torch.ones(1), name="again", op=hvd.Sum).item(), flush=True)


def c3_removed() -> None:
    """An elastic job continues without this worker, which its next init() ends."""
    server = become_rank_0(1, elastic=True)
    hvd.init()
    hvd.shutdown()
    print("REMOVED", flush=True)
    hvd.init()
    print("STILL HERE", server, flush=True)


def c4_stall() -> None:
    """Rank 1 submits a tensor only after Horovod has reported that it is missing."""
    hvd.init()
    deadline = time.monotonic() + 60
    reported = Path(os.environ["REPORTED"])
    while hvd.rank() == 1 and not reported.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    hvd.allreduce(torch.ones(1), name="late tensor")


def c5_left_halfway() -> None:
    """An operation fails on rank 0 alone, for lack of memory, and a longer one follows.

    The other ranks receive data of the second operation in the first, and it does not fit. All
    ranks must raise.
    """
    hvd.init()
    others = 20_000_000
    mine = 10
    # rank 0 needs room for the others' parts: 160 MB
    first = torch.ones(mine if hvd.rank() == 0 else others)
    second = torch.ones(500_000 if hvd.rank() == 0 else mine)
    hvd.allgather(torch.ones(1), name="warm-up")
    hvd.barrier()
    if hvd.rank() == 0:
        limit = psutil.Process().memory_info().vms + 140_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    handles = [hvd.allgather_async(first, name="first"), hvd.allgather_async(second, name="second")]
    try:
        for handle in handles:
            hvd.synchronize(handle)
    except HorovodInternalError:
        hvd.shutdown()
        os._exit(0)
    os._exit(3)


def c7_c15_half_sums() -> None:
    """Add a million pairs of fp16 and bf16 numbers over two ranks, and compare
    with rounded sums of fp32.
    """
    hvd.init()
    bits = torch.randint(
        -(2**15), 2**15, (2, 2**20 + 5), generator=torch.Generator().manual_seed(0)
    ).to(torch.int16)
    wrong = 0
    for kind in (torch.float16, torch.bfloat16):
        pairs = bits.view(kind)
        expected = (pairs[0].float() + pairs[1].float()).to(kind)
        (found,) = hvd.grouped_allreduce([pairs[hvd.rank()].clone()], op=hvd.Sum, name=f"{kind}")
        wrong += int(((found != expected) & ~(found.isnan() & expected.isnan())).sum())
    hvd.shutdown()
    sys.exit(f"{wrong} sums are wrong" if wrong else 0)


def c8_sums() -> None:
    """Compare sums of many lengths, types and operations with sums in the order of the ranks.

    Only with SHARED=1 they use shared memory, and sum in place what lies in memory that all ranks
    see. NO_ROOM=RANK: that rank cannot create files or shared memory.
    """
    if os.environ.get("NO_ROOM") == os.environ.get(
        "HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    ours = HorovodWorld()
    # Look now: the first rank that shuts down ends it for all.
    shared = "/memfd:horovod-" in Path("/proc/self/maps").read_text()
    visible = ours.share(25_000_000)
    # Around 8 KB and 1 MB.
    lengths = [0, 1, 2, 7, 1024, 1025, 2048, 2049, 262_143, 262_144, 262_145, 400_001, 3_000_000]
    operations = {
        hvd.Sum: torch.add,
        hvd.Min: torch.minimum,
        hvd.Max: torch.maximum,
        hvd.Product: torch.mul,
    }
    wrong = 0
    for kind in (torch.float32, torch.float16, torch.float64, torch.int32, torch.int64):
        for length in lengths:
            of_ranks = [
                (torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 3).to(kind)
                for rank in range(hvd.size())
            ]
            for op, add in operations.items():
                expected = reduce(add, of_ranks)
                own = of_ranks[hvd.rank()]
                name = f"{kind}.{length}.{op}"
                wrong += not torch.equal(hvd.allreduce(own, op=op, name=name), expected)
                if visible is not None:
                    lies = visible[800:][: own.nbytes].view(kind).copy_(own)
                    hvd.allreduce_(lies, op=op, name=f"in place.{name}")
                    squares = 0.0
                    if (kind, op) == (torch.float32, hvd.Sum):
                        squares = float(expected.double().square().sum())
                    wrong += not torch.equal(lies, expected)
                    wrong += not isclose(_squares_at(lies) or 0.0, squares, rel_tol=1e-5)
    parts = [torch.full((1 + 3000 * number,), float(hvd.rank() + number)) for number in range(40)]
    sums = hvd.grouped_allreduce(parts, op=hvd.Sum, name="group")
    ranks = sum(range(hvd.size()))
    wrong += sum(
        not torch.all(found == ranks + hvd.size() * number) for number, found in enumerate(sums)
    )
    ours.close()
    if wrong or not shared == (visible is not None) == (os.environ["SHARED"] == "1"):
        sys.exit(f"{wrong} sums are wrong; {shared=}; {visible is not None=}")


def c8_lost_peer() -> None:
    """The last rank dies while the others wait for its numbers; they notice it in
    a third of the time limit.
    """
    hvd.init()
    hvd.allreduce(torch.ones(1), name="all are here")
    if hvd.rank() == hvd.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        hvd.allreduce(torch.ones(1_000_000), name="without the last")
    except HorovodInternalError:
        limit_s = float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"])
        os._exit(0 if time.monotonic() - start < limit_s / 3 else 4)
    os._exit(3)


def c10_waits() -> None:
    """Rank 1 comes four seconds late; waiting for it takes rank 0 no processor time."""
    hvd.init()
    rank = hvd.rank()
    hvd.allreduce(torch.ones(1), name="sum")
    if rank == 1:
        time.sleep(4)
    start = time.thread_time()
    hvd.allreduce(torch.ones(1), name="sum")
    took = time.thread_time() - start
    hvd.shutdown()
    if took > 1:
        sys.exit(f"rank {rank} waited busily for {took:.1f} s")


def c11_half_a_message() -> None:
    """Rank 1 dies in the middle of a message that SENDER sends; rank 0 notices
    it long before a timeout.
    """
    sender = int(os.environ["SENDER"])
    hvd.init()
    rank = hvd.rank()
    pids = hvd.allgather_object(os.getpid(), name="pids")
    hvd.allreduce(torch.ones(1), name="warm-up")
    # 512 MB, of which a few are on their way at a time
    message = torch.full([2**27], float(rank == sender))
    first = message[:1].numpy()
    last = message[-1:].numpy()
    handle = hvd.broadcast_async_(message, sender, name="message")
    if rank != sender:
        while not first[0]:  # by the thread that receives
            pass
        os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    code = 3
    try:
        hvd.synchronize(handle)
    except HorovodInternalError:
        code = 0 if time.monotonic() - start < 60 else 4
    if rank != sender and last[0]:
        code = 5  # the message was complete before the sender died
    os._exit(code)


def c12_addresses() -> None:
    """Print the addresses at which this rank is connected to its peers."""
    os.environ["HOROVOD_GLOO_IFACE"] = os.environ["INTERFACE"]
    hvd.init()
    hvd.allreduce(torch.ones(1), name="all are connected")
    addresses = {address.ip for c in established() for address in (c.laddr, c.raddr)}
    os.write(1, f"AT {sorted(addresses)}\n".encode())
    hvd.allreduce(torch.ones(1), name="all have looked")


def l3_lines() -> None:
    """Print one line on each stream."""
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    print(f"out of {rank}")
    print(f"error of {rank}", file=sys.stderr)


def l7_many_lines() -> None:
    """Print more than a pipe holds, and leave the file DONE at the end."""
    for number in range(2000):
        print(f"line {number:90}", flush=True)
        print(f"error {number:90}", file=sys.stderr, flush=True)
    Path(os.environ["DONE"]).write_text("done")


def s3_impostor() -> None:
    """Print how many bytes rank 0 sends to another process at the port of rank 1, whose
    answer SAYS is right or wrong.

    Only rank 1 and readers of the store know the right answer.
    """
    server = become_rank_0(2)
    question = os.urandom(16)
    answer = os.urandom(16)
    says = answer if os.environ["SAYS"] == "right" else os.urandom(16) + b"\0" * 1000

    def in_gloos_order(port: int) -> int:
        """Return a port's place in Gloo's order: on one host the later rank
        connects to the earlier one.
        """
        return int(struct.unpack("=H", struct.pack("!H", port))[0])

    def impostor() -> None:
        store = server._httpd.cache
        while "0" not in store.get("global", {}):
            time.sleep(0.01)
        address = bytearray(store["global"]["0"])  # the address of rank 1 would be of the same kind
        limit = in_gloos_order(struct.unpack_from("!H", address, 2)[0])
        sockets = [socket.create_server(("127.0.0.1", 0))]
        while in_gloos_order(sockets[-1].getsockname()[1]) >= limit:
            sockets.append(socket.create_server(("127.0.0.1", 0)))
        struct.pack_into("!H", address, 2, sockets[-1].getsockname()[1])
        address[-32:] = question + answer  # the ticket
        store["global"]["1"] = bytes(address)
        connection, _ = sockets[-1].accept()
        # rank 0 asks which process is there
        assert connection.recv(16, socket.MSG_WAITALL) == question
        connection.sendall(says)
        sent = b""
        with suppress(ConnectionResetError):  # rank 0 did not read the answer to its end
            while part := connection.recv(1000):
                sent += part
        print("SENT", len(sent), flush=True)

    thread = threading.Thread(target=impostor)
    thread.start()
    try:
        hvd.init()
    except ValueError as error:
        print("RAISED", error, flush=True)
    thread.join(60)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
