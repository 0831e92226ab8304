"""How values and gradients are encoded for other ranks."""

import io
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.errors import UsageError
from hvd_train.membership import Member, RankReport
from hvd_train.world.wire import arrived, outgoing, packed, pieces, unpacked
from tests.support.faults import Malicious

KINDS = st.sampled_from([torch.uint8, torch.float16, torch.int32, torch.float64])


@given(st.lists(st.tuples(st.integers(0, 30), KINDS)), st.integers(1, 100))
def test_large_tensors_are_split_and_small_ones_packed(
    sizes: list[tuple[int, torch.dtype]], most_bytes: int
) -> None:
    """No operation exceeds the time limit of a slow link, none is empty, and few are nearly so."""
    tensors = [torch.arange(size).to(kind) for size, kind in sizes]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    sent = [outgoing(piece) for piece in pieces(tensors, most_bytes)]
    for piece, payload in zip(pieces(copies, most_bytes), sent, strict=True):
        arrived(piece, payload)
    assert all(map(torch.equal, copies, tensors))
    assert all(0 < len(payload) <= most_bytes for payload in sent)
    if max((tensor.nbytes for tensor in tensors), default=0) <= most_bytes:
        assert all(len(one) + len(two) > most_bytes for one, two in itertools.pairwise(sent))


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
        assert repr(unpacked(packed(value))) == repr(value)
    for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn):
        sent = torch.arange(6).view(2, 3).to(dtype)
        got = unpacked(packed({"tensor": sent}))["tensor"]
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))
