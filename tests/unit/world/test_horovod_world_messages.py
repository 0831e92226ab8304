"""What a rank hands to Horovod's operations, piece by piece and under which names, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_train.errors import RankLost
from hvd_train.world.horovod_world import HorovodInternalError, hvd
from hvd_train.world.wire import MOST_BYTES, packed, pieces
from tests.unit.world.test_horovod_world import FourRanks


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FourRanks:
    """Rank 1 of four, alone."""
    for name in ("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        monkeypatch.setenv(name, "set by a test")
    return FourRanks()


def test_a_sum_is_a_sum_and_comes_when_it_is_waited_for(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Horovod's mean, under the name that was given, by which ranks find each other's tensors."""
    begun: list[Any] = []
    monkeypatch.setattr(hvd, "allreduce_async_", lambda tensor, **named: begun.append((tensor, named)) or 7)
    monkeypatch.setattr(hvd, "synchronize", lambda handle: ("the sum", handle))
    tensor = torch.ones(2)
    for total in (world.start_sum(tensor, "losses")(), world.sum(tensor, "losses")):
        assert total == ("the sum", 7)
        given, named = begun.pop()
        assert given is tensor
        assert named == {"name": "losses", "op": hvd.Sum}


def test_tensors_arrive_piece_by_piece_and_all_of_them(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pieces are on their way at a time, each under a name that no other one has then."""
    sent = [torch.arange(5 * MOST_BYTES + 1).to(torch.uint8), torch.arange(9.0), torch.arange(4)]
    stream = [piece.outgoing() for piece in pieces(sent)]
    under_way: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(room: torch.Tensor, root: int, name: str) -> str:
        assert name not in under_way
        assert name.startswith("hvd_train.tensors.")
        assert len(under_way) < 4
        assert root == 0
        assert room.dtype == torch.uint8
        under_way[name] = room, stream.pop(0)
        return name

    def finish(name: str) -> torch.Tensor:
        room, arrived = under_way.pop(name)
        return room.copy_(arrived)

    monkeypatch.setattr(hvd, "broadcast_async_", begin)
    monkeypatch.setattr(hvd, "synchronize", finish)
    received = [torch.zeros_like(tensor) for tensor in sent]
    progress: list[int] = []
    world.broadcast_tensors(received, 0, progress.append)
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))
    assert sum(progress) == sum(tensor.nbytes for tensor in sent)
    assert (stream, under_way) == ([], {})


def test_the_root_sends_its_tensors_and_keeps_them(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where they lie; nothing is written into them."""
    tensors, sent = [torch.arange(9.0), torch.arange(4)], list[torch.Tensor]()
    before = [tensor.clone() for tensor in tensors]
    monkeypatch.setattr(hvd, "broadcast_async_", lambda payload, root, name: sent.append(payload) or root)
    monkeypatch.setattr(hvd, "synchronize", lambda handle: sent[-1].zero_())
    world.broadcast_tensors(tensors, 1)
    (payload,) = sent
    assert payload.numel() == 36 + 32
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))


Begun = dict[str, tuple[torch.Tensor, int]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """What was handed to Horovod to be broadcast, by name; what is waited for has arrived as ones."""
    begun: Begun = {}

    def begin(payload: torch.Tensor, root: int, name: str) -> str:
        assert name not in begun
        begun[name] = payload, root
        return name

    monkeypatch.setattr(hvd, "broadcast_async_", begin)
    monkeypatch.setattr(hvd, "synchronize", lambda name: begun[name][0].fill_(1))
    return begun


@pytest.mark.parametrize("keep", [False, True])
def test_what_others_send_meanwhile_arrives_unless_one_keeps_ones_own(
    world: FourRanks, begun: Begun, keep: bool
) -> None:
    """All pieces are on their way at once, each by its name; this rank takes part where it wants nothing, too."""
    tensors = [torch.zeros(MOST_BYTES + 1, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)]
    wait = world.start_broadcast(tensors, 2, keep=keep)
    assert list(begun) == ["hvd_train.start_broadcast.0", "hvd_train.start_broadcast.1"]
    assert [(payload.numel(), root) for payload, root in begun.values()] == [(MOST_BYTES, 2), (6, 2)]
    assert not any(tensor.any() for tensor in tensors)
    wait()
    assert [bool(tensor.all()) for tensor in tensors] == [not keep] * 2
    assert [bool(tensor.any()) for tensor in tensors] == [not keep] * 2


@pytest.mark.parametrize("start", [True, False])
def test_tensors_that_nobody_asks_to_keep_are_overwritten(world: FourRanks, begun: Begun, start: bool) -> None:
    """A rank takes over what the root has, however it is sent."""
    tensors = [torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)]
    if start:
        world.start_broadcast(tensors, 2)()
    else:
        world.broadcast_tensors(tensors, 2)
    assert all(bool(tensor.all()) for tensor in tensors)


def test_what_the_root_sends_meanwhile_is_its_own(world: FourRanks, begun: Begun) -> None:
    """Its bytes go out, and nothing comes in."""
    first, second = torch.full((3,), 7, dtype=torch.uint8), torch.full((5,), 8, dtype=torch.uint8)
    wait = world.start_broadcast([first, second], 1)
    ((payload, root),) = begun.values()
    assert (payload.tolist(), root) == ([7] * 3 + [8] * 5, 1)
    wait()
    assert (first.tolist(), second.tolist()) == ([7] * 3, [8] * 5)


@pytest.mark.parametrize("breaks", ["broadcast_async_", "synchronize"])
def test_a_rank_that_is_lost_under_way_is_a_lost_rank(
    world: FourRanks, begun: Begun, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """Be it found when a piece is handed over, or when it is waited for."""

    def broken(*arguments: Any, **named: Any) -> int:
        raise HorovodInternalError("connection reset")

    monkeypatch.setattr(hvd, breaks, broken)
    with pytest.raises(RankLost, match="connection reset"):
        world.start_broadcast([torch.ones(1)], 0)()


def test_a_value_arrives_as_the_root_has_sent_it(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root keeps its own value; the others learn how much comes, then take it in, whatever they passed."""
    value = {"weights": torch.arange(5.0), "name": "a" * 1000}
    sizes: list[tuple[list[int], int, str]] = []
    sent: list[torch.Tensor] = []

    def of_root(tensor: torch.Tensor, root: int, name: str) -> torch.Tensor:
        sizes.append((tensor.tolist(), root, name))
        return torch.tensor(sizes[0][0])

    def through(tensors: list[torch.Tensor], root: int) -> None:
        (payload,) = tensors
        if root == world.place.rank:
            sent.append(payload)
        else:
            assert payload.shape == sent[0].shape
            payload.copy_(sent[0])

    monkeypatch.setattr(hvd, "broadcast", of_root)
    monkeypatch.setattr(world, "broadcast_tensors", through)
    assert world.broadcast(value, root=1) is value
    received = world.broadcast({"name": "of another rank"}, root=0)
    assert torch.equal(received["weights"], value["weights"])
    assert received["name"] == value["name"]
    assert sizes == [([sent[0].numel()], 1, "hvd_train.broadcast.size"), ([0], 0, "hvd_train.broadcast.size")]


def test_a_broken_broadcast_is_a_lost_rank(world: FourRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a value is the first that its ranks exchange, and already then one may be gone."""

    def broken(*arguments: Any, **named: Any) -> torch.Tensor:
        raise HorovodInternalError("connection closed")

    monkeypatch.setattr(hvd, "broadcast", broken)
    with pytest.raises(RankLost, match="connection closed"):
        world.broadcast("value", root=1)


def test_no_operation_of_a_gather_carries_more_than_others_do(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, not from each rank: on a slow link the limit is for the whole. Values may differ in length."""
    share = MOST_BYTES // 4
    values = [None, bytes(range(256)) * (5 * share // 768), "of rank 2", b"x" * (share // 2)]
    payloads = [packed(value) for value in values]
    carried: list[tuple[str, int]] = []

    def allgather(given: torch.Tensor, name: str) -> torch.Tensor:
        if not carried:
            assert given.tolist() == [payloads[1].numel()]
            parts = [torch.tensor([payload.numel()]) for payload in payloads]
        else:
            begin = (len(carried) - 1) * share
            parts = [payload[begin : begin + share] for payload in payloads]
            assert torch.equal(given, parts[1])
        together = torch.cat(parts)
        carried.append((name, together.nbytes))
        return together

    monkeypatch.setattr(hvd, "allgather", allgather)
    assert world.gather(values[1]) == values
    # The trace of a step knows the two by these names, as does Horovod's timeline.
    assert [name for name, _ in carried] == ["hvd_train.gather.size", *["hvd_train.gather"] * 3]
    assert max(num_bytes for _, num_bytes in carried) <= MOST_BYTES


def test_a_gather_from_which_a_rank_is_missing_is_a_lost_rank(
    world: FourRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is how ranks find each other out between two steps."""

    def broken(*arguments: Any, **named: Any) -> torch.Tensor:
        raise HorovodInternalError("connection closed")

    monkeypatch.setattr(hvd, "allgather", broken)
    with pytest.raises(RankLost, match="connection closed"):
        world.gather("value")
