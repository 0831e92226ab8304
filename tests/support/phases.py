"""Writes down when a worker does what in a change of world, into one file for all workers of a job."""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import re
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
    "synchronize": "hvd_train.training:Training._synchronize",
    "digest": "hvd_train.state:TrainState.digest",
    "claim": "hvd_train.output:Output.claim",
    "read": "hvd_train.checkpoint:read",
    "transfer": "hvd_train.transfer:synchronize",
    "open": "hvd_train.output:Output.open",
    "step": "hvd_train.step:Step.take",
    "commit": "hvd_train.checkpoint:DiskStore.commit",
    "write": "hvd_train.checkpoint:write",
    "last commit": "hvd_train.checkpoint:DiskStore.commit_last",
}
"""The functions that are timed, by the names of the phases."""


def write_down() -> None:
    """From here on, write a line for each call of a function of POINTS in this process; once is enough."""
    for phase, point in POINTS.items():
        owner, name = re.fullmatch(r"(.+)[.:](\w+)", point).groups()
        function = getattr(pkgutil.resolve_name(owner), name)
        if not hasattr(function, "__wrapped__"):
            setattr(pkgutil.resolve_name(owner), name, timed(phase, function))


def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        begun = time.time()
        line = {"phase": phase, "begun": round(begun, 3), "host": socket.gethostname(), "process": os.getpid()}
        try:
            return function(*arguments, **named)
        except BaseException as error:
            line["failed"] = repr(error)[:200]
            raise
        finally:
            line["seconds"] = round(time.time() - begun, 3)
            with Path(FILE).open("ab", buffering=0) as file:
                file.write((json.dumps(line) + "\n").encode())

    return call
