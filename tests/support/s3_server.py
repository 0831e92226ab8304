"""A server that speaks S3, in a process of its own.

`python -m tests.support.s3_server PORT` prints its port, serves, and ends with its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

KEYS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


class S3Server:
    """The server's process, which can be stopped and started again on the same port, without what it had."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it serves."""
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.support.s3_server", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env=environment,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(next(line for line in self.process.stdout if line.strip().isdigit()))

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def variables(self) -> dict[str, str]:
        """What a client has in its environment to use it."""
        return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def system(self) -> Any:
        """An fsspec file system of the server's objects; the variables must be in the environment."""
        import fsspec

        return fsspec.filesystem(
            "s3",
            key=KEYS["AWS_ACCESS_KEY_ID"],
            secret=KEYS["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=f"http://127.0.0.1:{self.port}",
            skip_instance_cache=True,
            use_listings_cache=False,
        )


def _serve(port: int) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
