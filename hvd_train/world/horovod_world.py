"""The only module of a worker that imports Horovod: `World` by its collectives. Its exceptions leave here as ours."""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import horovod.torch as hvd
import torch
from horovod.common.elastic import State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.elastic import orphans
from hvd_train.errors import RankLost, UsageError
from hvd_train.launch import launcher, mpi_roll_call, roll_call, slurm
from hvd_train.world import heartbeat, time_slices
from hvd_train.world.world import Pending, Place, Reduction, Wish, WorldChanged, fill_missing_gradients, stay, together

T = TypeVar("T")

# Gradients are reduced in groups of about this size, so that one group travels while the next is computed.
_GROUP_BYTES = 25 * 2**20
_JOIN_ATTEMPTS = 5  # a peer may die while all meet again, and another after it


@dataclass(frozen=True)
class Part:
    """A part of an MPI job's ranks, with a training of its own.

    Their communicator (mpi4py's), and this rank's place on its host among all ranks of the job, which decides its GPU.
    """

    communicator: Any
    local_rank: int
    local_size: int


class HorovodWorld:
    """The ranks that horovodrun, mpirun or srun has started, or a part of them.

    All must give the same `facts`, by name. Raises UsageError where they do not, RankLost where a rank does not come.
    """

    def __init__(self, part: Part | None = None, facts: Mapping[str, str] | None = None) -> None:
        self._part = part
        self._facts = facts or {}
        self._mpi: Any = None
        # Else Horovod joins what happens to be ready at the same moment into one reduction, and from three ranks on
        # the order of a sum's additions depends on the place in it: the same training would give other bits.
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
        # A rank that lives but does not come is named after a minute (Horovod's default); this ends the job.
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600")
        self._wrapped: list[Any] = []
        self._rendezvous = _meet_by_srun() if slurm.alone(os.environ) else None
        self.place = self._meet()

    def _meet(self) -> Place:
        if self._part is not None:
            mpi_roll_call.call(self._part.communicator, self._facts)
        elif mpi_roll_call.meets_over_mpi(os.environ) and hvd.mpi_built():
            self._mpi = _call_over_mpi(self._facts)
        elif (board := roll_call.store(os.environ)) is not None:
            rank, size = (int(os.environ[f"HOROVOD_{what}"]) for what in ("RANK", "SIZE"))
            roll_call.call(board, rank, size, self._facts, os.environ)
        with _as_ours(), time_slices.short():
            hvd.init(comm=None if self._part is None else self._part.communicator)
        on_host = (hvd.local_rank(), hvd.local_size())
        if self._part is not None:
            on_host = (self._part.local_rank, self._part.local_size)
        return Place(hvd.rank(), hvd.size(), *on_host, hvd.cross_rank())

    def start_sum(self, tensor: Tensor, name: str) -> Pending:
        """See World."""
        with _as_ours():
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
        return lambda: _wait(handle)

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """See World."""
        return self.start_sum(tensor, name)()

    def broadcast(self, value: T, root: int) -> T:
        """See World."""
        mine = self.place.rank == root
        payload = _packed(value) if mine else torch.empty(0, dtype=torch.uint8)
        with _as_ours():
            size = hvd.broadcast(torch.tensor([payload.numel()]), root, name="hvd_train.broadcast.size")
            if not mine:
                payload = torch.empty(int(size), dtype=torch.uint8)
            hvd.broadcast_(payload, root, name="hvd_train.broadcast")
        return value if mine else _unpacked(payload)

    def gather(self, value: T) -> list[T]:
        """See World."""
        payload = _packed(value)
        with _as_ours():
            sizes = hvd.allgather(torch.tensor([payload.numel()]), name="hvd_train.gather.size")
            payloads = hvd.allgather(payload, name="hvd_train.gather")
        return [_unpacked(one) for one in payloads.split(sizes.tolist())]

    def wrap(self, optimizer: Optimizer, model: nn.Module, reduction: Reduction) -> Optimizer:
        """See World. Gradients are summed: each rank's loss is already divided by the whole global batch."""
        if reduction.adasum:
            self._check_adasum()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        with _as_ours():
            wrapped: Any = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=named,
                compression=_Wire(hvd.Compression.fp16 if reduction.fp16_wire else hvd.Compression.none),
                op=hvd.Sum,
            )
        wrapped.state.update(optimizer.state)  # Horovod takes its groups along, and leaves this behind
        wrapped.reduction = reduction
        self.regroup(wrapped)
        # A backward pass, which calls this, may be the first to find that another rank is lost.
        wrapped._grouped_allreduce_grad_async = _translated(functools.partial(_send, wrapped))
        self._wrapped.append(wrapped)
        return wrapped  # type: ignore[no-any-return]

    def regroup(self, optimizer: Optimizer) -> None:
        """See World."""
        wrapped: Any = optimizer
        of_all = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in of_all if parameter.requires_grad]
        # Not by the constructor, which broadcasts their names: in an elastic job the ranks need not have met yet.
        groups = _groups(trained, wrapped.reduction.groups)
        wrapped._groups, wrapped.rider = groups, None  # and what travels with the first of them
        wrapped._p_to_group = {parameter: group for group in groups for parameter in group}
        wrapped._group_counts = dict.fromkeys(groups, 0)
        wrapped._requires_update = set(trained) if wrapped._requires_update else set()  # none in a world of one

    def _check_adasum(self) -> None:
        size = self.place.size
        if size & (size - 1):
            raise UsageError(f"--reduction adasum works on 1, 2, 4, 8, ... ranks, not on {size}")
        if size > 1 and not hvd.mpi_enabled():
            raise UsageError("--reduction adasum needs MPI: type horovodrun --mpi, or mpirun")

    def expect_passes(self, optimizer: Optimizer, passes: int) -> None:
        """See World. A rank without a backward pass joins when the sums are waited for."""
        passes = max(1, passes)
        if optimizer.backward_passes_per_step != passes:  # type: ignore[attr-defined]  # added by Horovod
            optimizer.set_backward_passes_per_step(passes)  # type: ignore[attr-defined]

    def sum_with_gradients(self, optimizer: Optimizer, tensor: Tensor) -> Pending:
        """See World. A member of one of their groups: for a reduction of its own, all ranks would agree once more."""
        wrapped: Any = optimizer
        if wrapped.reduction.adasum or wrapped.reduction.predivide != 1:
            return self.start_sum(tensor, "step")
        wrapped.rider = tensor  # and there the sum is in the end; a launched world of one has it already
        return lambda: tensor

    @contextmanager
    def reduced(self, optimizer: Optimizer) -> Iterator[None]:
        """See World."""
        with _as_ours():
            if optimizer._requires_update:  # type: ignore[attr-defined]
                _send_the_rest(optimizer)
                optimizer.synchronize()  # type: ignore[attr-defined]
            else:  # a launched world of one: Horovod has no part in its gradients
                fill_missing_gradients(optimizer)
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]
            yield

    def prepare(self, build: Callable[[], T]) -> T:
        """See World."""
        return together(self, build)

    def run(self, body: Callable[[], T], enter: Callable[[], None] = stay) -> T:
        """Call them."""
        enter()
        return body()

    def timeline(self, path: Path | None) -> None:
        """See World."""
        if os.environ.get(launcher.TIMELINE) == launcher.ON_DEMAND:
            if path is None:
                hvd.stop_timeline()
            else:
                hvd.start_timeline(str(path))

    def heard(self) -> Wish:
        """Nothing: the ranks are what they are, and signals come by themselves."""
        return "train"

    def carrier(self, device: torch.device) -> str:
        """See World. Over NCCL the ranks still agree on what is next by one of the others, which is named as well."""
        controller = "MPI" if hvd.mpi_enabled() else "Gloo"
        return f"NCCL, with {controller}" if device.type == "cuda" and hvd.nccl_built() else controller

    def close(self) -> None:
        """Leave the group; the ranks that are still at work learn of it."""
        hvd.shutdown()
        if self._mpi is not None:
            self._mpi.Finalize()  # Horovod leaves it to whoever began
        if self._rendezvous is not None:
            self._rendezvous.shutdown()


class ElasticWorld(HorovodWorld):
    """The ranks of an elastic job, as they come and go.

    A process meets the others in `run` only: until then it has imported and built what it needs, alone, so that
    nobody waits for it.
    """

    def __init__(self, facts: Mapping[str, str] | None = None) -> None:
        self._lives: _Lives | None = None
        self._met = False
        orphans.kill_predecessor(os.environ)
        self._pulse = heartbeat.Pulse(os.environ)
        super().__init__(facts=facts)

    def _meet(self) -> Place:
        return Place(local_rank=launcher.slot(os.environ), local_size=int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))

    def prepare(self, build: Callable[[], T]) -> T:
        """See World."""
        return build()

    def run(self, body: Callable[[], T], enter: Callable[[], None] = stay) -> T:
        """See World. Raises RankLost where the others cannot be reached again."""

        def live(_: State) -> T:
            try:
                return body()
            except RankLost as error:
                raise HorovodInternalError(str(error)) from error
            except WorldChanged:
                raise HostsUpdatedInterrupt(skip_sync=False) from None

        self._lives = _Lives(enter, self._forget_broken_step)
        self._join()
        lives: Callable[[State], T] = run_fn(live, self._join_again)
        with _as_ours():
            return lives(self._lives)

    def heard(self) -> Wish:
        """What the driver wants."""
        told_by_horovod = self._lives is not None and self._lives.asked
        return "change" if told_by_horovod and self._pulse.wish == "train" else self._pulse.wish

    def _join_again(self) -> None:
        assert self._lives is not None
        self._lives.asked = False  # said once: from here on it may be news after the ranks have met
        hvd.shutdown()
        self._join()

    def _forget_broken_step(self) -> None:
        """Reductions under way have ended with the fault; the optimizer would wait for them in the next step."""
        for optimizer in self._wrapped:
            optimizer._handles.clear()
            optimizer._group_counts.update(dict.fromkeys(optimizer._group_counts, 0))
            optimizer.set_backward_passes_per_step(optimizer.backward_passes_per_step)

    def _join(self) -> None:
        started = time.monotonic()
        for attempt in range(_JOIN_ATTEMPTS):
            try:
                if self._met:
                    heartbeat.announce(os.environ)  # and Horovod's core asks
                else:
                    heartbeat.ask_for_rank(os.environ, self._facts)
                    self._met = True
                with time_slices.short():
                    hvd.init()
                break
            except (ValueError, OSError) as error:
                hvd.shutdown()
                if attempt == _JOIN_ATTEMPTS - 1:
                    raise RankLost(f"cannot meet the other ranks: {error}") from error
                waited, reason = time.monotonic() - started, str(error).partition("\n")[0]
                print(f"hvd-train: the ranks have not met within {waited:.0f} s, again: {reason}", file=sys.stderr)
                time.sleep(1.0)
        self._pulse.met()  # a newcomer has heard of the change that it is itself
        local_rank = self.place.local_rank  # the device is chosen; Horovod may count this host's ranks anew
        self.place = Place(hvd.rank(), hvd.size(), local_rank, hvd.local_size(), hvd.cross_rank())


class _Lives(State):  # type: ignore[misc]  # Horovod has no types
    """Horovod's elastic state over ours: live weights are kept on a fault, and no synchronisation is ever skipped."""

    def __init__(self, enter: Callable[[], None], forget_broken_step: Callable[[], None]) -> None:
        super().__init__(bcast_object=None, get_rank=hvd.rank)
        self._enter, self._forget_broken_step = enter, forget_broken_step
        self.asked = False

    def on_hosts_updated(self, timestamp: int, update_res: Any) -> None:
        """From a thread of Horovod's. Its own way counts in whole seconds and forgets a second change in one."""
        self.asked = True

    def on_reset(self) -> None:
        """Horovod's own would drop the messages that have come since."""

    def save(self) -> None:
        """Nothing is copied: the live weights are those after some whole step, on every survivor."""

    def restore(self) -> None:
        """What the step has touched of the model has been undone where it was taken."""
        self._forget_broken_step()

    def sync(self) -> None:
        """All ranks come to one state."""
        try:
            self._enter()
        except RankLost as error:
            raise HorovodInternalError(str(error)) from error


def _call_over_mpi(facts: Mapping[str, str]) -> Any:
    """The roll call by mpi4py, where there is one that works with Horovod's MPI; its module where we began with it."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    if MPI.Is_finalized() or len(_mpi_libraries()) != 1:
        return None
    begun = MPI.Is_initialized()  # by the user's own script
    if not begun:
        with mpi_roll_call.reporting_the_wait(launcher.launched(os.environ)):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    mpi_roll_call.call(MPI.COMM_WORLD, facts)  # a rank that ends without finalizing makes mpirun end all at once
    return None if begun else MPI


def _mpi_libraries() -> set[str]:
    """The MPIs that are in this process: Horovod's, and another one if mpi4py has brought it along."""
    words = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return {word for word in words if re.search(r"/libmpi(ch)?\.so", word)}


def _meet_by_srun() -> Any:
    """Tell Horovod what Slurm says of this rank; on rank 0, serve what launchers serve, a place to meet (returned)."""
    said = slurm.variables(os.environ)
    os.environ.update(said)
    address, port = said["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(said["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    if said["HOROVOD_RANK"] != "0":
        slurm.wait_for_rank_0(address, port)
        return None
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    try:
        server = RendezvousHTTPServer(("", port), RendezvousHandler, 0)
    except OSError as error:
        raise UsageError(
            f"port {port}, which follows from the job's number, cannot be had ({error.strerror}): "
            f"export {slurm.PORT}=N, a free one, before srun"
        ) from None
    server.init([])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


# Not by Horovod's own functions for objects, which make a number of Python's of every byte: a state of 200 MB took
# 15 s, in which nothing else of the process ran.
def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _unpacked(payload: Tensor) -> Any:
    return pickle.loads(payload.numpy().data)  # noqa: S301  # from a rank of this job


def _groups(parameters: list[Tensor], count: int | None) -> list[tuple[Tensor, ...]]:
    """`count` groups of about the same size, or groups of about `_GROUP_BYTES`.

    In the order in which a backward pass reaches them, more or less: the last comes first.
    """
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
    full = _GROUP_BYTES if count is None else math.ceil(sum(sizes.values()) / count)
    groups: list[list[Tensor]] = []
    size = full
    for parameter in reversed(parameters):
        if size >= full:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += sizes[parameter]
    return [tuple(group) for group in groups]


class _Wire:
    """What travels of a gradient: its numbers as they lie in memory, since Horovod takes no other order of them."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        wire, _ = self._compression.compress(_as_it_lies(gradient))
        return wire, gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> Tensor:
        # Back to where it came from: fresh memory for the sum of a large gradient takes longer than the cast.
        if wire.data_ptr() != gradient.data_ptr():
            _as_it_lies(gradient).copy_(wire)
        return gradient


def _as_it_lies(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _send(optimizer: Any, group: tuple[Tensor, ...]) -> Any:
    """Begin to reduce a group. Horovod's own does not divide before and multiply after where gradients are grouped."""
    flat, contexts = zip(*[optimizer._compression.compress(parameter.grad) for parameter in group], strict=True)
    if group is optimizer._groups[0] and optimizer.rider is not None:
        flat = (*flat, optimizer.rider)
    factor = optimizer.reduction.predivide
    handle = hvd.grouped_allreduce_async_(
        flat,
        name=optimizer._parameter_names[group[0]],
        op=hvd.Adasum if optimizer.reduction.adasum else hvd.Sum,
        prescale_factor=1 / factor,
        postscale_factor=factor,
    )
    return handle, contexts


def _send_the_rest(optimizer: Any) -> None:
    """Send the groups in which this rank has no gradient for some parameter, with zeros for it.

    Left to itself Horovod sends the parameters of such a group one by one, and ranks that have them all a group.
    """
    for group in optimizer._group_counts:
        if group not in optimizer._handles:
            for parameter in group:
                optimizer._handles.pop(parameter, None)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer._handles[group] = optimizer._grouped_allreduce_grad_async(group)
            optimizer._group_counts[group] = 0


def _translated(function: Callable[..., T]) -> Callable[..., T]:
    def call(*arguments: Any) -> T:
        with _as_ours():
            return function(*arguments)

    return call


def _wait(handle: int) -> Tensor:
    with _as_ours():
        result: Tensor = hvd.synchronize(handle)
    return result


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except HorovodInternalError as error:
        raise RankLost(str(error).splitlines()[0] if str(error) else "a collective operation failed") from error
