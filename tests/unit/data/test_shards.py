"""Samples in tar files."""

import io
import tarfile
from pathlib import Path

import pytest

from hvd_train import Shards, UsageError


def write(path: str, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as shard:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return Path(path)


def two_shards() -> list[Path]:
    names = [f"train/{n:03}" for n in range(5)]
    files = [{f"{name}.cls": bytes([n]), f"{name}.jpg": bytes(1000 + n)} for n, name in enumerate(names)]
    return [write("a.tar", {**files[0], **files[1], **files[2]}), write("b.tar", {**files[3], **files[4]})]


def test_each_sample_is_found_by_number_also_by_a_saved_index(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        shards = Shards(two_shards(), lambda parts: (parts["__key__"], len(parts["jpg"]), parts["cls"][0]))
        assert [shards[n] for n in (4, 0, 2, 3, 1)] == [(f"train/{n:03}", 1000 + n, n) for n in (4, 0, 2, 3, 1)]
        assert len(shards) == 5
    assert capsys.readouterr().err.count("making the index of a.tar") == 1


def test_an_index_of_another_file_is_made_again() -> None:
    first, _ = two_shards()
    Shards([first])
    write("a.tar", {"x.txt": b"new" * 5000})
    assert Shards([first])[0] == {"__key__": "x", "txt": b"new" * 5000}
    first.with_name("a.tar.index.npz").write_bytes(b"damaged")
    assert len(Shards([first])) == 1


@pytest.mark.parametrize(
    ("files", "mode", "says"),
    [
        ({"a.jpg": b"1", "a.cls": b"2", "b.jpg": b"3"}, "w", r"the sample b has no \.cls"),
        ({"a.jpg": b"1"}, "w:gz", "cannot be read as a tar file without compression"),
        ({"README": b"1"}, "w", "no files with an extension"),
        (None, "", "absent.tar: cannot be read as a tar file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(files: dict[str, bytes] | None, mode: str, says: str) -> None:
    path = Path("absent.tar") if files is None else write("odd.tar", files, mode)
    with pytest.raises(UsageError, match=says):
        Shards([path])
