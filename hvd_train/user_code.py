"""Errors that the user's own code raises: where in it, and a traceback without our frames and those of libraries."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary

_OURS = f"{Path(__file__).parent}{os.sep}"
_OF_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_OF_LIBRARIES = {"site-packages", "dist-packages"}  # of Python, of a virtual environment, of the system or of a user
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_START = "Traceback (most recent call last)"


def place(error: BaseException) -> str:
    """Return where the user's code has raised an error, as in `mine.py, line 5, in forward`; else empty text."""
    frames = _theirs(_frames(error))
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def told(error: BaseException) -> str:
    """Return what the user is to read of an error in code of theirs, which its last line names; else empty text."""
    error = _raised(error)
    where = place(error)
    if not where:
        return ""
    text = _filtered(_traceback(error)).rstrip()
    text = text.replace(_START, f"{_START}, without the frames of hvd_train and of libraries", 1)
    return f"{text}\nhvd-train: your code has failed: {_message(text)} ({where})"


def is_theirs(file: str) -> bool:
    """Return whether a file that a traceback names is the user's, and not ours, Python's or a library's."""
    return not (file.startswith((_OURS, *_OF_PYTHON, "<")) or _OF_LIBRARIES & set(Path(file).parts))


def _raised(error: BaseException) -> BaseException:
    """Return the error that was raised: Python lets no StopIteration out of a generator, such as our loops are."""
    while str(error) == "generator raised StopIteration" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _message(text: str) -> str:
    """Return the first line of the message below the last frame of a traceback."""
    lines = text.splitlines()
    last = max(number for number, line in enumerate(lines) if _FRAME.match(line))
    return next(line for line in lines[last:] if not line.startswith("  "))


def _frames(error: BaseException) -> list[FrameSummary]:
    """Return the frames of an error, without those of its causes."""
    if _by_loader_process(error):
        last = str(error).rpartition(_START)[2]
        return [FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(last)]
    return list(traceback.extract_tb(error.__traceback__))


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error and of its causes; that of a loader process stands in its text."""
    if _by_loader_process(error):
        return _START + str(error).partition(_START)[2]
    return "".join(traceback.format_exception(error))


def _filtered(text: str) -> str:
    """Return a traceback without the frames of files that are not the user's."""
    kept = []
    shown = True
    for line in text.splitlines(keepends=True):
        frame = _FRAME.match(line)
        shown = is_theirs(frame[1]) if frame else shown or not line.startswith("  ")  # a frame has lines of code
        if shown:
            kept.append(line)
    return "".join(kept)


def _by_loader_process(error: BaseException) -> bool:
    return "DataLoader worker process" in str(error) and f"Original {_START}" in str(error)


def _theirs(frames: list[FrameSummary]) -> list[FrameSummary]:
    """Return the frames in the user's files; none where our code was called from there, and raised the error."""
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
    after = frames[ours[-1] + 1 :] if ours else frames
    if not any(is_theirs(frame.filename) for frame in after):
        return []
    return [frame for frame in frames if is_theirs(frame.filename)]
