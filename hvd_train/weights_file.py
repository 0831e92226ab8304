"""The files of plain weights that a run leaves behind, in one of two formats, and how they are found."""

from __future__ import annotations

from pathlib import Path

BEST, FINAL = "model-best.pt", "model-final.pt"
SAFETENSORS = ".safetensors"


def found_in(run: Path, name: str) -> Path | None:
    """Return the file BEST or FINAL of a run folder, in whichever format it is; None where there is none.

    Of two it is the one that was written last: a run that goes on in the other format removes the old file right after.
    """
    formats = [run / name, (run / name).with_suffix(SAFETENSORS)]
    return max((file for file in formats if file.exists()), key=lambda file: file.stat().st_mtime_ns, default=None)
