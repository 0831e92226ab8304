"""Windows of a file of tokens."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_train.config import DataConfig
from hvd_train.data.by_value import ByValue
from hvd_train.data.tokens import Tokens
from hvd_train.errors import UsageError
from hvd_train.tasks.samples import GPT, token_files


@pytest.mark.parametrize(("count", "windows"), [(12, 2), (13, 3), (16, 3), (17, 4)])
@pytest.mark.parametrize("kind", ["uint16", "uint32", "npy"])
def test_targets_are_the_following_tokens(
    count: int, windows: int, kind: str, tmp_path: Path
) -> None:
    """Each window needs one token more than its length."""
    numbers = np.arange(60_000, 60_000 + count)
    path = tmp_path / f"tokens.{kind}"
    np.save(path, numbers) if kind == "npy" else numbers.astype(kind).tofile(path)
    data = Tokens(path, 4, **({} if kind == "npy" else {"dtype": kind}))
    items = list(data)  # type: ignore[call-overload]  # by numbers from 0
    assert len(data) == len(items) == windows
    assert torch.equal(torch.cat([x for x, _ in items]), torch.from_numpy(numbers[: 4 * windows]))
    assert all(torch.equal(y, x + 1) and y.dtype == torch.int64 for x, y in items)
    assert torch.equal(data[-1][0], items[-1][0])


def test_loader_processes_share_the_file(tmp_path: Path) -> None:
    """Tokens are not copied to each."""
    np.arange(2**20, dtype=np.uint32).tofile(tmp_path / "tokens")
    content = pickle.dumps(ByValue(Tokens(tmp_path / "tokens", 1024, "uint32"), 0))
    received: Any = pickle.loads(content)
    assert len(content) < 10_000
    assert received[1022][1][-1] == 1023 * 1024


@pytest.mark.parametrize(
    ("content", "dtype"), [(b"", "uint16"), (b"abc", "uint16"), (b"abcd", "uint16"), (b"ab", "x")]
)
def test_files_without_a_window_are_one_line(content: bytes, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    for wrong in (path, tmp_path / "none"):
        with pytest.raises(UsageError, match=f"{wrong}") as found:
            Tokens(wrong, 2, dtype)
        assert "\n" not in str(found.value)


def test_the_gpt_recipe_reads_token_files_of_a_folder(tmp_path: Path) -> None:
    """Its model has a logit for each token, and does not see the following ones."""
    for part, count in (("train", 1000), ("val", 300)):
        (np.arange(count) % 50).astype("uint16").tofile(tmp_path / f"{part}.bin")
    train, val = token_files(DataConfig(data_dir=tmp_path))
    assert (len(train), len(val), len(train.classes)) == (7, 2, 50)  # type: ignore[attr-defined]
    text, following = train[1]
    assert text[:3].tolist() == [28, 29, 30]
    model = GPT(50).eval()
    logits = model(text[None])
    changed = torch.cat([text[:100], following[100:]])
    assert logits.shape == (1, 128, 50)
    assert torch.allclose(model(changed[None])[:, :100], logits[:, :100], atol=1e-5)
