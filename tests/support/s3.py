"""An S3 server on this host that is slow, fails now and then, counts bytes, and may go away."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

BUCKET = "s3://bucket/set"
NEEDED = "pip install 'moto[server]' s3fs"


class S3:
    """The server of `serving`; a test may change its attributes and read `fetched`."""

    latency_s = 0.0  # of each request
    fails_every = 0  # this many requests, one fails; 0: none
    is_away = False  # whether all requests fail
    hangs = False  # whether requests get no answer while it is so

    def __init__(self, application: Any) -> None:
        self.fetched = 0  # bytes of tar files
        self._application = application
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request, by WSGI."""
        time.sleep(self.latency_s)
        while self.hangs:
            time.sleep(0.1)
        fails = self.fails_every and next(self._numbers) % self.fails_every == 0
        if fails or self.is_away:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        answer = self._application(environ, start_response)
        return self._counted(answer) if environ["REQUEST_METHOD"] == "GET" else answer

    def _counted(self, answer: Any) -> Iterator[bytes]:
        for part in answer:
            with self._lock:
                self.fetched += len(part)
            yield part


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Serve the files of a folder at BUCKET, and by http at $AWS_ENDPOINT_URL/bucket/set, for this
    process and those that it starts.
    """
    moto = pytest.importorskip("moto.server", reason=NEEDED)
    s3fs = pytest.importorskip("s3fs", reason=NEEDED)
    from werkzeug.serving import make_server

    s3 = S3(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, s3, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    s3fs.S3FileSystem.clear_instance_cache()  # they have the address of an earlier server
    try:
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        with suppress(FileExistsError):  # moto keeps it for this process
            system.mkdir("bucket", acl="public-read")
        with suppress(FileNotFoundError):
            system.rm(BUCKET, recursive=True)
        system.put(f"{folder}/", BUCKET, recursive=True, ACL="public-read")
        yield s3
    finally:
        s3.hangs = False
        server.shutdown()
        thread.join()
