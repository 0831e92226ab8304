"""The file of a run folder that says which processes its ranks are, for whoever looks for them. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_train import plain_file
from hvd_train.launch.seat import Process, Seat
from hvd_train.run_files import durable
from hvd_train.run_files.durable import Permission, always

NAME = ".ranks.json"
_MOST_BYTES = 2**24
_HOST = re.compile(r"(?!-)[A-Za-z0-9_.:-]+", re.ASCII)  # ssh would take a name that begins with - as an option


def write(folder: Path, seats: Sequence[Seat], permission: Permission = always) -> None:
    """Write down the processes of all ranks, in the order of ranks. A disk that does not take it ends no training."""
    with suppress(OSError):
        durable.write_text(folder / NAME, json.dumps([asdict(seat) for seat in seats]), permission)


def read(folder: Path) -> list[Seat]:
    """Return the processes of all ranks of the last world of a run; empty where there is no such file.

    Raises ValueError where the file is none of ours.
    """
    try:
        text = plain_file.read_text(folder / NAME, _MOST_BYTES)
    except OSError:
        return []
    try:
        return [_seat(entry) for entry in json.loads(text)]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _seat(entry: Any) -> Seat:
    launcher = entry["launcher"]
    return Seat(_process(entry["process"]), _host(entry["address"]), None if launcher is None else _process(launcher))


def _process(entry: Any) -> Process:
    number, started = entry["number"], entry["started"]
    if type(number) is not int or type(started) is not int or number < 1:
        raise ValueError("a number of a process is none")
    return Process(_host(entry["host"]), number, started)


def _host(value: Any) -> str:
    if not isinstance(value, str) or not _HOST.fullmatch(value):
        raise ValueError("a name of a host is none")
    return value
