"""How values and gradients are encoded for other ranks."""

import io
import pickle
from pathlib import Path

import pytest
import torch

from hvd_train.errors import UsageError
from hvd_train.membership import Member, RankReport
from hvd_train.world.wire import outgoing, packed, pieces, unpacked
from tests.support.faults import Malicious


def test_large_tensors_are_split_and_small_ones_packed() -> None:
    """No operation exceeds the time limit of a slow link, and few are nearly empty."""
    large = torch.arange(25, dtype=torch.uint8)
    small = [torch.full((3,), n, dtype=torch.uint8) for n in range(4)]
    sent = [outgoing(piece) for piece in pieces([large, *small], most_bytes=10)]
    assert [len(payload) for payload in sent] == [10, 10, 8, 9]
    assert torch.equal(torch.cat(sent), torch.cat([large, *small]))
    full = [torch.zeros(size, dtype=torch.uint8) for size in (4, 6, 4, 6)]
    assert [len(outgoing(piece)) for piece in pieces(full, most_bytes=10)] == [10, 10]
    assert list(pieces([torch.empty(0), torch.empty(2, 0)])) == []


def test_a_message_runs_no_code() -> None:
    """A malicious peer may send a pickle."""
    file = io.BytesIO()
    torch.save({"weights": [Malicious()]}, file)
    payload = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        unpacked(payload)
    assert not Path("owned").exists()


def test_a_message_keeps_types() -> None:
    """Plain values, our types, errors and tensors arrive bit for bit."""
    report = RankReport(Member("h1", 7), run_dir=Path("run"))
    for value in (None, (1, 2.5, True, "ä", b"\0", {3}), report, UsageError("wrong")):
        arrived = unpacked(packed(value))
        assert (type(arrived), repr(arrived)) == (type(value), repr(value))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint16, torch.float8_e4m3fn):
        sent = torch.arange(6).view(2, 3).to(dtype)
        arrived = unpacked(packed({"tensor": sent}))["tensor"]
        assert (arrived.dtype, arrived.shape) == (dtype, sent.shape)
        assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8))
