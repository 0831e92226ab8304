"""Files of records, one in a line, that go back to the step from which a run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvd_train.plain_file import in_place
from hvd_train.run_files.tail import lines_backwards


class Mark(NamedTuple):
    """What decides whether a line of a file did happen; `step` and `epoch` are 0 where it is of none."""

    kind: str
    step: int
    epoch: int


def forget_after(path: Path, step: int, epochs_done: int, read: Callable[[bytes], Mark | None]) -> tuple[int, int]:
    """Remove from a file what comes after `step`, and a torn last line; return the last step and epoch in it.

    `read` returns the mark of a line, or None for what is none of ours.

    An epoch whose last step is done, but which a stop or a crash kept from its end, ends again and is then written
    again: its old line goes, too. Only the end of the file is read, back to the record of an earlier step: whatever
    stands before that is of earlier steps as well. Raises OSError where the file cannot be written at all: what is kept
    is written in place, so that a full disk has room for it.
    """
    if not path.exists():
        return step, epochs_done  # the run goes on in another folder than the one it began in
    last_step = last_epoch = 0
    kept = list[bytes]()  # of the lines from `begin` on, the last one first
    with open(path, "r+b", opener=in_place) as file:
        begin = 0
        for offset, line in lines_backwards(file):
            begin = offset
            mark = read(line)
            if mark is None:
                continue  # torn when the process was killed, or none of ours
            ends_again = mark.kind == "epoch" and mark.epoch > epochs_done
            if mark.step <= step and not ends_again:
                kept.append(line.rstrip(b"\n") + b"\n")
                if mark.kind == "step":
                    last_step = max(last_step, mark.step)
                if mark.kind in ("step", "epoch"):  # the record of an epoch comes before that of a step of the next one
                    last_epoch = max(last_epoch, mark.epoch - (mark.kind == "step"))
            if mark.kind == "step" and mark.step < step:
                break
        tail = b"".join(reversed(kept))
        file.seek(begin)
        if file.read() != tail:
            # In this order: whatever moment the process is killed in, no line that is kept is lost.
            file.seek(begin)
            file.write(tail)
            file.flush()
            os.ftruncate(file.fileno(), begin + len(tail))
            with suppress(OSError):  # a full disk may say so here, too; the lines are cut off all the same
                os.fsync(file.fileno())
    return last_step, last_epoch
