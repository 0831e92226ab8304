"""Shards to read, and a file system for them that fails, counts and is shared by processes."""

import functools
import io
import itertools
import os
import re
import tarfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from tests.support.jpegs import encoded
from tests.support.worlds import own_generator


def write_samples(path: Path, samples: Iterable[Mapping[str, bytes]], first: int = 0) -> None:
    """Write a tar file of samples, by extension; their keys are numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, parts in enumerate(samples, first):
            for name, content in parts.items():
                _add(tar, f"{number}.{name}", content)


def write_tar(path: Path, keys: Iterable[str], **parts: int) -> Path:
    """Write a tar file of samples; `parts` have the number of bytes by extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for name, size in (parts or {"bin": 3}).items():
                _add(tar, f"{key}.{name}", key.encode().ljust(size, b"-"))
    return path


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_digits(folder: Path, samples: int) -> int:
    """Write shards of this many digits as images below train/ and val/; return their bytes."""
    digits = load_digits()
    for part in ("train", "val"):
        numbers = [n for n in range(len(digits.target)) if (n % 5 == 0) == (part == "val")]
        for first in range(0, len(numbers), samples):
            write_samples(
                folder / part / f"{first:04}.tar",
                [
                    {
                        "png": encoded(
                            Image.fromarray((digits.images[n] * 15).astype("u1")), "png"
                        ),
                        "cls": b"%d" % digits.target[n],
                    }
                    for n in numbers[first : first + samples]
                ],
                first,
            )
    (folder / "classes.txt").write_text("\n".join("0123456789"))
    return sum(path.stat().st_size for path in folder.glob("train/*.tar"))


def network(num_classes: int) -> nn.Module:
    """Return a network for these images, without kinks, so that runs agree to 1e-5."""
    layers = nn.Linear(3 * 64, 64), nn.Tanh(), nn.Linear(64, num_classes)
    return own_generator(nn.Sequential(nn.Flatten(), *layers))


def keys_of(shards: Any) -> list[str]:
    return [shards[number]["__key__"] for number in range(len(shards))]


class Shaky(LocalFileSystem):  # type: ignore[misc]
    """The local files at shaky://PATH. The next copies fail with `errors`; each is written to
    `fetched`, and the length of each other read to `read`.
    """

    protocol = "shaky"
    errors: ClassVar[list[BaseException]] = []
    fetched: ClassVar[list[str]] = []
    read: ClassVar[list[int]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("shaky://"))
        return stripped

    def get_file(self, path: str, local: str, *_: object, **__: object) -> None:
        Shaky.fetched.append(Path(path).name)
        content = Path(path).read_bytes()
        if Shaky.errors:
            Path(local).write_bytes(content[: len(content) // 2])
            if isinstance(error := Shaky.errors.pop(0), SystemExit):
                os.kill(os.getpid(), 9)
            raise error
        Path(local).write_bytes(content)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        content = Path(self._strip_protocol(path)).read_bytes()[start:end]
        Shaky.read.append(len(content))
        return content


fsspec.register_implementation("shaky", Shaky, clobber=True)


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves files of `directory` as a store does: in ranges, with versions. Of ten requests the
    first `fails_of_ten` fail.
    """

    protocol_version = "HTTP/1.1"
    fails_of_ten = 0
    numbers = itertools.count()

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = Path(self.translate_path(self.path))
        is_failure = next(self.numbers) % 10 < self.fails_of_ten
        content = b"" if is_failure or not path.is_file() else path.read_bytes()
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        end = min(int(found[2]) + 1 if found and found[2] else len(content), len(content))
        code = 503 if is_failure else 404 if not path.is_file() else 206 if found else 200
        self.send_response(code)
        if code == 206:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{zlib.crc32(content)}"')
        self.send_header("Content-Length", str(end - first))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[first:end])


@contextmanager
def http_server(folder: Path, *, fails_of_ten: int = 0) -> Iterator[str]:
    """Serve a folder on this host, and yield its URL."""
    settings = {"fails_of_ten": fails_of_ten, "numbers": itertools.count()}
    handler = functools.partial(type("Handler", (RangeHandler,), settings), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
