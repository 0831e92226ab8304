"""Tokens from a file."""

from pathlib import Path

import numpy as np
import pytest

from hvd_train import Tokens, UsageError


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_an_epoch_predicts_each_token_once(dtype: str) -> None:
    """All but the first, and those after the last whole sequence."""
    tokens = np.arange(50, 50 + 2 * 8 + 3).astype(dtype)
    tokens.tofile("tokens.bin")
    sequences = Tokens("tokens.bin", 8, dtype)
    assert [list(following) for _, following in sequences] == [list(range(51, 59)), list(range(59, 67))]
    assert [list(inputs) for inputs, _ in sequences] == [list(range(50, 58)), list(range(58, 66))]


def test_a_file_without_a_sequence_is_one_line() -> None:
    Path("short.bin").write_bytes(bytes(16))
    with pytest.raises(UsageError, match=r"short.bin has 8 tokens of type uint16: a sequence of 8 needs one more"):
        Tokens("short.bin", 8)
    with pytest.raises(UsageError, match="absent: No such file"):
        Tokens("absent", 8)
