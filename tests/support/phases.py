"""Writes down when a worker does what in a change of world, into one file for all workers of a job."""

from __future__ import annotations

import functools
import importlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "phases.jsonl"
POINTS = {
    "leave": "hvd_train.membership:Membership.leave",
    "rejoin": "hvd_train.world.elastic_world:ElasticWorld._join_again",
    "connect": "hvd_train.world.horovod_world:start",
    "meet": "hvd_train.training:Training._meet",
    "digest": "hvd_train.state:TrainState.digest",
    "claim": "hvd_train.output:Output.claim",
    "read": "hvd_train.checkpoint:read",
    "transfer": "hvd_train.transfer:_fill",
    "open": "hvd_train.output:Output.open",
    "step": "hvd_train.step:Step.finish",
    "commit": "hvd_train.checkpoint:DiskStore.commit",
    "write": "hvd_train.checkpoint:write",
    "last commit": "hvd_train.checkpoint:DiskStore.commit_last",
}
"""The functions that are timed, by the names of the phases."""


def write_down() -> None:
    """From here on, write a line for each call of a function of POINTS in this process; once is enough."""
    for phase, point in POINTS.items():
        owner, name = found(point)
        function = getattr(owner, name)
        if not hasattr(function, "__wrapped__"):
            setattr(owner, name, timed(phase, function))


def found(point: str) -> tuple[Any, str]:
    """Return the module or class in which a function stands, and its name there."""
    module, _, path = point.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        begun, failed = time.time(), ""
        try:
            return function(*arguments, **named)
        except BaseException as error:
            failed = repr(error)[:200]
            raise
        finally:
            line = {"phase": phase, "begun": round(begun, 3), "seconds": round(time.time() - begun, 3)}
            line |= {"host": socket.gethostname(), "process": os.getpid()} | ({"failed": failed} if failed else {})
            with Path(FILE).open("ab", buffering=0) as file:
                file.write((json.dumps(line) + "\n").encode())

    return call
