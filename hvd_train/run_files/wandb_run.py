"""The numbers of a training at Weights & Biases."""

from __future__ import annotations

import importlib
import json
import netrc
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from typing_extensions import override

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.run_files.destination import Tracker
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.records import Ending, Numbers
from hvd_train.run_files.service_record import ServiceRecord

_PROJECT = "hvd_train"
_EXIT_CODES = {"finished": 0, "stopped": os.EX_TEMPFAIL, "failed": 1}
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BLOCK, _HEADER = 1 << 15, 7  # a .wandb file is a log as LevelDB has them, after 7 bytes of its own
_LOOKED_BACK = 64 * _BLOCK


def check_login() -> None:
    """Raise UsageError where runs would go to the service, and no key says whose they are. The service is not asked."""
    settings = _settings()
    keys = (settings.api_key, os.environ.get("WANDB_API_KEY"), os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
    if settings.mode == "online" and not any(keys) and not _in_netrc(urlsplit(settings.base_url).hostname or ""):
        raise UsageError("--log-to wandb: nobody is logged in: type wandb login, or set WANDB_MODE=offline")


def _settings() -> Any:
    """Return wandb's settings, of the environment and its files. `wandb.setup` would start a process for that."""
    setup: Any = importlib.import_module("wandb.sdk.wandb_setup")
    return setup.singleton().settings


def _in_netrc(host: str) -> bool:
    """Return whether `wandb login` has left a key for a host."""
    named = os.environ.get("NETRC")
    for path in (Path(named),) if named else (Path("~/.netrc"), Path("~/_netrc")):
        with suppress(OSError, netrc.NetrcParseError, RuntimeError):
            if netrc.netrc(path.expanduser()).authenticators(host):
                return True
    return False


class WandbRun(Tracker):
    """A run at Weights & Biases. Its files are in the run folder, in `wandb`, and its id in wandb.json.

    wandb-core, the process that does wandb's work, holds rows back for a while, and loses them when the training is
    killed. So what the run has is found out anew each time: from the service or, offline, from the files.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], permission: Permission = always) -> None:
        """`settings` are the config of the run, which the service shows."""
        self._folder, self._settings = folder, settings
        self._record = ServiceRecord(folder / "wandb.json", permission)
        self._run: Any = None
        self._last_step = -1  # that the run had when it was opened
        self._sent: dict[str, int] = {}

    @override
    def open(self) -> str:
        import wandb

        if self._record.id is None or not _ID.fullmatch(self._record.id):
            self._record.begin(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
        name = None if os.environ.get("WANDB_NAME") else self._folder.resolve().name
        self._run = run = wandb.init(
            project=_settings().project or _PROJECT,  # that of WANDB_PROJECT, or of `wandb init`
            id=self._record.id,
            name=name,
            dir=self._folder,
            config=dict(self._settings),
            allow_val_change=True,
            resume="allow",
            reinit="create_new",  # a program may have a run of its own
            settings=wandb.Settings(console="off", silent=True),
        )
        if run.offline:
            self._last_step = max((_last_step(file) for file in self._files()), default=-1)
            return f"wandb is offline; to send the run there later, type wandb sync {Path(run.dir).parent}"
        self._last_step = run.starting_step - 1
        return f"wandb: {run.url}" if run.url else "wandb is disabled"

    @override
    def is_new(self, numbers: Numbers) -> bool:
        return numbers.kind == "end" or numbers.step > self._sent.get(numbers.kind, self._last_step)

    @override
    def add(self, several: Sequence[Numbers]) -> None:
        for numbers in several:
            if numbers.kind == "end":
                self._run.summary.update(dict(numbers.values))
                continue
            of_epoch = {} if numbers.epoch is None else {"epoch": numbers.epoch}
            # Rows of one step become one, and steps may not fall.
            self._run.log({**numbers.values, **of_epoch}, step=max(numbers.step, self._run.step))
            self._sent[numbers.kind] = numbers.step

    @override
    def close(self, ending: Ending | None) -> None:
        how = "finished" if ending is None else ending.how
        if how == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[how])

    @override
    def abandon(self) -> None:
        """Kill wandb-core: at its end, the process would wait for it. What it has not sent is in its files."""
        import wandb

        def end() -> None:
            with suppress(Exception):
                wandb.teardown()

        with suppress(psutil.Error):
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if child.name().startswith("wandb-core"):
                        child.kill()
        ended = threading.Thread(target=end, daemon=True)
        ended.start()
        ended.join(1)

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"wandb/offline-run-*/run-{self._record.id}.wandb"))


def _last_step(file: Path) -> int:
    """Return the step of the last row in a .wandb file, -1 where there is none. Raises OSError."""
    types: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    errors: Any = importlib.import_module("google.protobuf.message")
    last = -1
    with suppress(errors.DecodeError, ValueError):
        for data in _records(file):
            record = types.Record()
            record.ParseFromString(data)
            steps = [item.value_json for item in record.history.item if "_step" in (item.key, *item.nested_key)]
            last = max([last, *(int(json.loads(step)) for step in steps)])
    return last


def _records(file: Path) -> Iterator[bytes]:
    """Yield the records at the end of a .wandb file, of at most 2 MB. Raises OSError."""
    with plain_file.opened(file) as log:
        size = log.seek(0, os.SEEK_END)
        at = max(0, size - _LOOKED_BACK) // _BLOCK * _BLOCK
        log.seek(at)
        data = log.read(size - at)
    at, record = 0 if at else _HEADER, None
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]  # after a checksum
        part = data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 2):  # whole, or the first part of several
            record = part
        elif record is not None:
            record += part
        if kind in (1, 4) and record is not None and at <= len(data):
            yield record
            record = None
