"""Windows of a file of tokens."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_train.config import DataConfig
from hvd_train.data.by_value import ByValue
from hvd_train.data.tokens import Tokens
from hvd_train.errors import UsageError
from hvd_train.tasks.samples import GPT, token_files


@pytest.mark.parametrize(("count", "windows"), [(12, 2), (13, 3), (16, 3)])
@pytest.mark.parametrize("file", ["tokens.bin", "tokens.npy"])
def test_targets_are_the_following_tokens(count: int, windows: int, file: str) -> None:
    """Each window needs one token more than its length."""
    numbers = np.arange(60_000, 60_000 + count)
    np.save(file, numbers) if file.endswith("npy") else numbers.astype("uint16").tofile(file)
    data = Tokens(file, 4)
    items = list(data)  # type: ignore[call-overload]  # by numbers from 0
    assert len(data) == len(items) == windows
    tokens, following = map(torch.cat, zip(*items, strict=True))
    assert torch.equal(tokens, torch.from_numpy(numbers[: 4 * windows]))
    assert torch.equal(following, tokens + 1)
    assert torch.equal(data[-1][0], tokens[-4:])


def test_loader_processes_share_the_file() -> None:
    """Tokens are not copied to each."""
    np.arange(2**20, dtype=np.uint32).tofile("tokens")
    content = pickle.dumps(ByValue(Tokens(Path("tokens").absolute(), 1024, "uint32"), 0))
    assert len(content) < 10_000
    assert pickle.loads(content)[1022][1][-1] == 1023 * 1024


@pytest.mark.parametrize(
    ("content", "dtype"), [(b"", "uint16"), (b"abc", "uint16"), (b"abcd", "uint16"), (b"ab", "x")]
)
def test_files_without_a_window_are_one_line(content: bytes, dtype: str) -> None:
    Path("numbers.bin").write_bytes(content)
    with pytest.raises(UsageError, match=r"numbers\.bin") as found:
        Tokens("numbers.bin", 2, dtype)
    assert "\n" not in str(found.value)


def test_the_gpt_recipe_reads_token_files_of_a_folder() -> None:
    """Its model has a logit for each token, and does not see the following ones."""
    for part, count in (("train", 1000), ("val", 300)):
        (np.arange(count) % 50).astype("uint16").tofile(f"{part}.bin")
    train, val = token_files(DataConfig(data_dir=Path()))
    assert (len(train), len(val), len(train.classes)) == (7, 2, 50)  # type: ignore[attr-defined]
    text, following = train[1]
    assert text[:3].tolist() == [28, 29, 30]
    model = GPT(50).eval()
    logits = model(text[None])
    changed = torch.cat([text[:100], following[100:]])
    assert logits.shape == (1, 128, 50)
    assert torch.allclose(model(changed[None])[:, :100], logits[:, :100], atol=1e-5)
