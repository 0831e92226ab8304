"""Implement `World` with Horovod.

No other module of a worker calls its operations; `launch.client` signs requests with it.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import horovod.torch as hvd
import torch
from horovod.common import elastic
from horovod.common.elastic import State, run_fn
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train.errors import RankLost, UsageError, first_line
from hvd_train.launch import client, launcher, rendezvous, roll_call
from hvd_train.launch.notice import Notice
from hvd_train.launch.stacks import waiting
from hvd_train.world.buckets import Reducer, memory_of_ranks
from hvd_train.world.wire import arrived, outgoing, packed, pieces, unpacked
from hvd_train.world.world import Gradients, PendingSum, Place, World, of_one_operation

T = TypeVar("T")

_CORE = hvd.mpi_ops._basics.MPI_LIB_CTYPES
if _HAS_C8 := hasattr(_CORE, "horovod_squares"):
    _CORE.horovod_place.restype = ctypes.c_bool
    _CORE.horovod_squares.restype = ctypes.c_double
_STALL_LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_HANGS_AFTER_S = 180  # of a wait that no data explain
# while one is sent, the ranks agree on the next ones, which takes as long on a fast link
_PIECES_UNDER_WAY = 4


class HorovodWorld(World):
    """The ranks that horovodrun, mpirun, srun or torchrun has started.

    `facts` are values, by name, that must be equal on all ranks; one may wait for data for
    `longest_wait_s`. The constructor waits for all ranks.
    Raises: UsageError: if facts differ; RankLost: if a rank does not start.
    """

    def __init__(
        self, facts: Mapping[str, str] | None = None, longest_wait_s: float = 600.0
    ) -> None:
        self._facts = facts or {}
        self._longest_wait_s = longest_wait_s
        # Fusion depends on timing, and the order of additions on the place in the fused buffer:
        # runs would differ.
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
        # Horovod would only name tensors, and lost connections that we report ourselves.
        os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
        # NCCL connects the ranks when a communicator forms, where a peer that dies is noticed, not
        # in the first sum.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        self._reducer: Reducer | None = None  # if ranks may be several
        self._placed: list[Tensor] = []
        self._begun: list[int] = []  # the sums of this step
        self._notice = Notice()
        if rendezvous.needed(os.environ):
            _begin_rendezvous()
        self._connect()

    def _connect(self) -> None:
        """Start Horovod with all ranks, which sets `place`, and compare their facts."""
        if roll_call.has_store(os.environ):
            roll_call.call(os.environ)
        self.allow_wait(self._longest_wait_s)
        self.place = start()
        try:
            self.compare(self._facts)
        except UsageError:
            stop()
            raise
        self.watch(self.gather((launcher.host_name(os.environ), os.getpid())))

    @override
    def allow_wait(self, seconds: float) -> None:
        # After a minute `Notice` names a live rank that does not take part; this ends the job.
        os.environ.setdefault(_STALL_LIMIT, str(round(seconds + _HANGS_AFTER_S)))

    @override
    def watch(self, members: Sequence[tuple[str, int]]) -> None:
        is_first = self.place.rank == 0 and self.place.size > 1
        self._notice.watch(members if is_first else [])

    @override
    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        handle = self._begin(lambda: hvd.allreduce_async_(tensor, name=name, op=hvd.Sum))

        def wait() -> Tensor:
            with self._by_first_cause(), waiting:
                total: Tensor = hvd.synchronize(handle)
            return total

        return wait

    def _begin(self, operation: Callable[[], int]) -> int:
        """Begin a sum of this step and return its handle."""
        with self._by_first_cause():
            handle = operation()
        self._begun.append(handle)
        return handle

    @contextmanager
    def _by_first_cause(self) -> Iterator[None]:
        """Raise an error of Horovod's as RankLost, with the reason of the first
        sum of this step that broke.

        After a sum has broken, Horovod shuts down, and all others fail with "shut down": the broken
        one has the reason.
        """
        with as_rank_lost():
            try:
                yield
            except HorovodInternalError as error:
                if "shut down" in str(error):
                    for begun in self._begun:
                        hvd.synchronize(begun)  # raises the reason; no sum is under way any more
                raise

    @override
    def broadcast(self, value: T, root: int) -> T:
        is_root = self.place.rank == root
        payload = packed(value) if is_root else torch.empty(0, dtype=torch.uint8)
        with as_rank_lost(), waiting:
            size = hvd.broadcast(
                torch.tensor([payload.numel()]), root, name="hvd_train.broadcast.size"
            )
        if not is_root:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast_tensors([payload], root)
        return value if is_root else unpacked(payload)

    @override
    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int) -> None:
        under_way: deque[tuple[int, list[Tensor], Tensor]] = deque()

        def finish_first() -> None:
            handle, piece, payload = under_way.popleft()
            with as_rank_lost(), waiting:
                hvd.synchronize(handle)
            if self.place.rank != root:
                arrived(piece, payload)

        for number, piece in enumerate(pieces(tensors)):
            if len(under_way) == _PIECES_UNDER_WAY:
                finish_first()
            payload = outgoing(piece)
            name = f"hvd_train.tensors.{number % _PIECES_UNDER_WAY}"
            with as_rank_lost():
                under_way.append((hvd.broadcast_async_(payload, root, name=name), piece, payload))
        while under_way:
            finish_first()

    @override
    def gather(self, value: T, what: str = "another operation") -> list[T]:
        payload = packed((what, value))
        with as_rank_lost(), waiting:
            sizes: list[int] = hvd.allgather(
                torch.tensor([payload.numel()]), name="hvd_train.gather.size"
            ).tolist()
            received = hvd.allgather(payload, name="hvd_train.gather")
        return of_one_operation([unpacked(of_rank) for of_rank in received.split(sizes)])

    @override
    def wrap(self, model: nn.Module, compression: str = "none") -> None:
        if (compressor := getattr(hvd.Compression, compression, None)) is None:
            needed = "python packaging/build_horovod.py` in a checkout of hvd_train"
            raise UsageError(f"this Horovod has no compression {compression}; type `{needed}")

        def distributed(plain: Optimizer, named: list[tuple[str, nn.Parameter]]) -> Any:
            # A sum: each rank's loss is already divided by the whole global batch.
            return hvd.DistributedOptimizer(
                plain, named_parameters=named, compression=compressor, op=hvd.Sum
            )

        if self.place.size > 1 or os.environ.get("HOROVOD_ELASTIC") == "1":  # as Horovod decides it
            self._reducer = Reducer(
                self, model, compressor, distributed, self._start_bucket, _squares_at
            )

    def _start_bucket(self, tensor: Tensor, name: str) -> int:
        """Begin to sum a bucket in place, as a group: Horovod fuses no group with other tensors.

        Raises RankLost.
        """
        return self._begin(lambda: hvd.grouped_allreduce_async_([tensor], name=name, op=hvd.Sum))

    @override
    def share(self, num_bytes: int) -> Tensor | None:
        # in which Horovod's patch C8 sums tensors in place
        if not (_HAS_C8 and _CORE.horovod_place(None, ctypes.c_size_t(0))):
            self._placed = []  # of an earlier world
            return None
        of_ranks = memory_of_ranks(self, num_bytes)
        if not of_ranks:
            return None
        addresses = [memory.data_ptr() for memory in of_ranks]
        _CORE.horovod_place(
            (ctypes.c_void_p * len(addresses))(*addresses), ctypes.c_size_t(num_bytes)
        )
        self._placed = of_ranks  # Horovod reads it
        return of_ranks[self.place.rank]

    @override
    def unwrap(self) -> None:
        if self._reducer is not None:
            self._reducer.leave_world()
            self._reducer = None

    @override
    def begin_update(self, parameters: Sequence[nn.Parameter], passes: int) -> None:
        self._begun.clear()
        super().begin_update(parameters, passes)
        if (reducer := self._reducer_of_several) is not None:
            with as_rank_lost():
                reducer.begin(parameters, passes)

    @override
    def end_pass(self) -> None:
        if (reducer := self._reducer_of_several) is not None:
            reducer.end_pass()

    @override
    def reduce(self) -> Gradients:
        reducer = self._reducer_of_several
        with self._by_first_cause(), waiting:
            return super().reduce() if reducer is None else reducer.reduce()

    @property
    def _reducer_of_several(self) -> Reducer | None:
        # one rank, which others may join, has nothing to sum
        return self._reducer if self.place.size > 1 else None

    @override
    def close(self) -> None:
        self._notice.watch([])
        stop()


def start() -> Place:
    """Start Horovod, wait for all ranks, and return the place of this one.

    Raises: RankLost, ValueError or OSError: if the ranks cannot connect.
    """
    with as_rank_lost():
        hvd.init()
    return Place(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def stop() -> None:
    """Stop Horovod. Other ranks that communicate raise RankLost."""
    hvd.shutdown()


@contextmanager
def as_rank_lost() -> Iterator[None]:
    """Raise an error of Horovod's inside this block as RankLost."""
    try:
        yield
    except HorovodInternalError as error:
        why = first_line(error)
        if "shut down" in why:  # two sentences that send the user to a log
            why = f"Horovod was shut down; if ranks waited for {_STALL_LIMIT}, lines above say why"
        raise RankLost(why) from error


class _ElasticState(State):  # type: ignore[misc]  # Horovod has no types
    """The state of `hvd.elastic`. Survivors keep their live weights, so nothing is saved.

    Every new world begins with `sync`; Horovod skips that if hosts were only removed (its issue
    #3399).
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        super().__init__(bcast_object=None, get_rank=hvd.rank)
        self._sync = sync

    def save(self) -> None:
        """Do nothing: the live weights are the copy."""

    def restore(self) -> None:
        """Do nothing: the broken step has undone its changes of the model, and the next
        begins with new gradients.
        """

    def sync(self) -> None:
        """Synchronize the state of all ranks."""
        try:
            self._sync()
        except RankLost as error:
            raise HorovodInternalError(str(error)) from error


def meet(sync: Callable[[], None], rejoin: Callable[[], None]) -> None:
    """Call `sync` in worlds of `hvd.elastic` until it succeeds; `rejoin`
    forms each after the first.

    The function that `hvd.elastic` runs in a world does nothing: the caller trains in it. Raises:
    RankLost: if `rejoin` does.
    """
    # Horovod's notifications listen on a port for pickles; our driver answers heartbeats instead.
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    elastic.notification_manager = SimpleNamespace(
        init=nothing, register_listener=nothing, remove_listener=nothing
    )
    with as_rank_lost():
        run_fn(nothing, rejoin)(_ElasticState(sync))


def _squares_at(tensor: Tensor) -> float | None:
    """Return the sum of the squares of the sums in `tensor`, if patch C8 added them up."""
    if not _HAS_C8:
        return None
    squares: float = _CORE.horovod_squares(ctypes.c_void_p(tensor.data_ptr()))
    return squares if squares >= 0 else None


def _begin_rendezvous() -> None:
    """Give Horovod this rank's place; on rank 0, serve the rendezvous until the process ends.

    Raises: UsageError: if the server's port is in use, or rank 0 cannot be found.
    """
    os.environ.update(rendezvous.variables(os.environ))
    if os.environ["HOROVOD_RANK"] != "0":
        rendezvous.find_rank_0(os.environ)
        return
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    port = int(os.environ[client.PORT])
    is_one_host = os.environ["HOROVOD_LOCAL_SIZE"] == os.environ["HOROVOD_SIZE"]
    # This host may resolve its own name to another address than the other hosts do.
    address = client.LOOPBACK if is_one_host else ""
    try:
        server = RendezvousHTTPServer((address, port), RendezvousHandler, 0)
    except OSError as error:
        raise UsageError(
            f"port {port} for the ranks cannot be had ({error.strerror}): export "
            f"{rendezvous.PORT}=N, a free one, on all hosts"
        ) from None
    server.init([])
    threading.Thread(target=server.serve_forever, daemon=True).start()
