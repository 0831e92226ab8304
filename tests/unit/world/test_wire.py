"""What is sent in place of values and gradients."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch

from hvd_train.elastic.members import Member, RankReport
from hvd_train.errors import UsageError
from hvd_train.world.wire import MOST_BYTES, GroupCompression, OneByOne, Together, has_no_gaps, packed, pieces, unpacked
from tests.support.malicious import Malicious


def test_a_value_comes_back_as_it_was() -> None:
    """Nested values with tensors in them, bit for bit, by way of one flat tensor of bytes."""
    value = {"pair": (1, 0.1), "tensor": torch.arange(6.0).view(2, 3), "none": None}
    payload = packed(value)
    assert (payload.dtype, payload.dim()) == (torch.uint8, 1)
    got = unpacked(payload)
    assert (got["pair"], got["none"]) == (value["pair"], None)
    assert torch.equal(got["tensor"], value["tensor"])


@pytest.mark.parametrize(
    ("compression", "sizes", "dtype"),
    [
        pytest.param(OneByOne(), [48, 5], torch.float32, id="one by one"),
        pytest.param(Together(torch.float16), [53], torch.float16, id="together"),
        pytest.param(Together(torch.bfloat16), [53], torch.bfloat16, id="together as bf16"),
        pytest.param(Together(torch.float16, as_one=False), [48, 5], torch.float16, id="together, for Adasum"),
    ],
)
def test_gradients_travel_as_they_lie_in_memory(
    compression: GroupCompression, sizes: list[int], dtype: torch.dtype
) -> None:
    """What is sent is contiguous, whatever order a gradient has; the sum arrives in the gradient's own order."""
    gradients = [torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last), torch.arange(5.0)]
    places, expected = [gradient.data_ptr() for gradient in gradients], [2 * gradient for gradient in gradients]
    sent, contexts = compression.compress(gradients)
    assert [tuple(tensor.shape) for tensor in sent] == [(size,) for size in sizes]
    assert all(tensor.is_contiguous() and tensor.dtype == dtype for tensor in sent)
    for tensor in sent:
        tensor *= 2
    # As Horovod does it: parameter by parameter, as long as there are sums and contexts.
    results = [compression.decompress(tensor, context) for tensor, context in zip(sent, contexts, strict=False)]
    assert all(result is gradient for result, gradient in zip(results, gradients, strict=False))
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    assert [gradient.data_ptr() for gradient in gradients] == places
    assert gradients[0].is_contiguous(memory_format=torch.channels_last)


def test_a_large_tensor_is_split_and_small_ones_travel_together() -> None:
    """So that no operation carries more than a slow link takes within its limit, nor many carry next to nothing."""
    large, small = torch.arange(25, dtype=torch.uint8), [torch.full((3,), n, dtype=torch.uint8) for n in range(4)]
    sizes = [piece.num_bytes for piece in pieces([large, *small], most_bytes=10)]
    assert sizes == [10, 10, 8, 9]
    sent = [piece.outgoing() for piece in pieces([large, *small], most_bytes=10)]
    assert torch.equal(torch.cat(sent), torch.cat([large, *small]))
    full = [torch.zeros(size, dtype=torch.uint8) for size in (4, 6, 4, 6)]
    assert [piece.num_bytes for piece in pieces(full, most_bytes=10)] == [10, 10]
    assert list(pieces([torch.empty(0), torch.empty(2, 0)])) == [], "nothing takes no operation"


def test_a_large_tensor_is_sent_from_its_own_memory_and_received_into_it() -> None:
    """A state of many gigabytes has no second copy, on either side."""
    tensor = torch.zeros(8, 3, 4, 4).to(memory_format=torch.channels_last)
    own = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    for piece in pieces([tensor], most_bytes=512):
        assert piece.outgoing().data_ptr() in own
        assert piece.room().data_ptr() in own


def test_several_small_tensors_arrive_each_in_its_place() -> None:
    """By way of bytes in other memory, whatever their types and orders of dimensions; nothing is in place before."""
    sent = [torch.arange(3.0), torch.arange(24).view(2, 3, 2, 2).to(memory_format=torch.channels_last)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    (out,), (piece,) = pieces(sent), pieces(received)
    room = piece.room()
    assert (room.dtype, room.shape) == (torch.uint8, (3 * 4 + 24 * 8,))
    room.copy_(out.outgoing())
    assert not any(tensor.any() for tensor in received)
    piece.arrived(room)
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))


def test_what_is_received_apart_leaves_a_tensor_as_it_is() -> None:
    """A rank that keeps its own takes part in an operation all the same."""
    tensor = torch.arange(4.0)
    (piece,) = pieces([tensor])
    piece.room(apart=True).fill_(255)
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_operation_carries_what_a_slow_link_takes_within_its_limit() -> None:
    """Each piece has the 5 s of an operation for itself: 8 Mbit/s will do."""
    assert MOST_BYTES * 8 / 8e6 < 5


@pytest.mark.parametrize(
    ("tensor", "fills"),
    [
        (torch.zeros(2, 3, 4, 5), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 3).t(), True),
        (torch.zeros(4, 3)[:, :2], False),
        (torch.zeros(4)[::2], False),
        (torch.zeros(1).expand(4), False),
        (torch.zeros(1).expand(2**50), False),
    ],
    ids=["plain", "channels last", "transposed", "columns", "every other", "expanded", "larger than any memory"],
)
def test_what_fills_its_memory_is_seen_from_its_strides(tensor: torch.Tensor, fills: bool) -> None:
    """Only that can be sent from where it lies; nothing is allocated to find out."""
    assert has_no_gaps(tensor) is fills


def test_what_ranks_send_runs_no_code() -> None:
    """A peer that is not one of ours sends what makes a folder where it is unpickled; it is refused."""
    file = io.BytesIO()
    torch.save({"weights": [Malicious()]}, file)
    payload = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        unpacked(payload)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        "",
        [],
        (1, 2.5, True, "ä", b"\0", None, {3}),
        {"a": [torch.bfloat16, Path("runs/x")]},
        RankReport(Member("h1", 7), run_dir=Path("run"), previous_members=(Member("h2", 8),)),
        UsageError("wrong"),
    ],
    ids=repr,
)
def test_what_is_sent_arrives(value: object) -> None:
    """With its type."""
    arrived = unpacked(packed(value))
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint16, torch.float8_e4m3fn])
def test_tensors_of_every_type_arrive(dtype: torch.dtype) -> None:
    """Buffers of a model may have any."""
    sent = torch.arange(3).to(dtype)
    arrived = unpacked(packed({"tensor": sent}))["tensor"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8))
