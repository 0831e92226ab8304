"""What wandb has written into the folder of a run, read back from its own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # a log as LevelDB has them: checksum 4, length 2, kind 1


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file; what a killed process left half written is not among them."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""  # after the file's own header
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if at > len(data):
            return
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def files_of(run: Path) -> list[Path]:
    """Return the .wandb files of a run, one for each time that it was begun or gone on with, the first one first."""
    return sorted(run.glob("wandb/*run-*/*.wandb"))


def history(run: Path) -> list[dict[str, Any]]:
    """Return the rows that wandb has of a run, in their order."""
    found = []
    for file in files_of(run):
        for record in records(file):
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                row.setdefault("_step", record.history.step.num)
                found.append(row)
    return found


def summary(run: Path) -> dict[str, Any]:
    """Return what the run's summary was set to, without what wandb takes over from the rows."""
    found: dict[str, Any] = {}
    for file in files_of(run):
        for record in records(file):
            for item in record.summary.update:
                found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def settings(run: Path) -> dict[str, Any]:
    """Return id, name and project of a run with its config, as its first file has them."""
    first = next(record.run for record in records(files_of(run)[0]) if record.HasField("run"))
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in first.config.update}
    return {"id": first.run_id, "name": first.display_name, "project": first.project, "config": values}


def exit_codes(run: Path) -> list[int]:
    """Return the exit code with which each part of a run has ended."""
    return [r.exit.exit_code for file in files_of(run) for r in records(file) if r.HasField("exit")]
