"""One training of `hvd-train bench scaling`: a job of its own, started by horovodrun, that prints into a log file."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hvd_train import config_file, plain_file
from hvd_train.config import Config
from hvd_train.doctor import questions
from hvd_train.launch import horovodrun
from hvd_train.run_files import durable, run_folder


@dataclass(frozen=True)
class Size:
    """A training on `workers` workers: its settings and its run folder."""

    workers: int
    config: Config
    folder: Path

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers != 1)}"

    @property
    def config_file(self) -> Path:
        """The file that holds its settings, beside the run folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def log_file(self) -> Path:
        """The file that takes what the job prints, beside the run folder."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def trained(self) -> bool:
        """Whether its training has finished."""
        return run_folder.has_ended(self.folder)


def command(size: Size, host_file: str | None, controller: str) -> list[str]:
    """Return the command line that trains one size."""
    launcher = horovodrun.line(size.workers, host_file, controller)
    return [*launcher, horovodrun.program("hvd-train"), "train", "--config", str(size.config_file.resolve())]


def train(line: Sequence[str], size: Size) -> str | None:
    """Run the command of one size to its end and return why it failed, or None.

    A SIGINT or SIGTERM that comes meanwhile is passed on to the job. Raises KeyboardInterrupt once it has ended by it.
    """
    durable.write_text(size.config_file, config_file.dump(size.config))
    with open(size.log_file, "ab", opener=plain_file.in_place) as log:
        begins = log.tell()
        # In a group of its own: a terminal's Ctrl-C comes to this process only, which passes it on once.
        with (
            subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
            _passing_signals_to(process) as received,
        ):
            code = process.wait()
    if received:
        raise KeyboardInterrupt
    if code == 0 and size.trained:
        return None
    with open(size.log_file, "rb") as file:
        file.seek(begins)
        output = file.read().decode(errors="replace")
    return f"{_reason(output) or f'exit code {code}'} (all it printed: {size.log_file})"


def _reason(output: str) -> str:
    """Return the last line in which a training says why it has ended, or else the error in its output, if any."""
    lines = output.splitlines()
    errors = [text for _, found, text in (line.partition("hvd-train: ") for line in lines) if found]
    stops = [line for line in lines if line.startswith("stopped by ")]
    return [*errors, *stops][-1] if errors or stops else questions.first_error(output)


@contextlib.contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to a process inside this block; yield the list of those that came."""
    received: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
