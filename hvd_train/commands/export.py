"""`hvd-train export`: a trained model for use elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags

USAGE = "  export RUN|CHECKPOINT    weights and a program of the trained model (torch.export; ONNX with --onnx)\n"


@dataclass(frozen=True)
class ExportOptions:
    """Write the best weights of a run or checkpoint as weights.pt, model.pt2 (torch.export) and model.json."""

    target: Annotated[Path, tyro.conf.Positional]
    """Run folder or checkpoint file."""
    output: Path | None = None
    """Folder for the files; default: RUN/export, or CHECKPOINT.export."""
    onnx: bool = False
    """Also write model.onnx (pip install onnx onnxscript onnxruntime)."""
    trust: bool = False
    """Import the code that the run names as its model or data; it runs with your permissions."""


def run(arguments: list[str]) -> int:
    """Export the model, print the path of each file and return 0. Raises UsageError if that cannot be done."""
    options = parse_flags(ExportOptions, arguments, f"{PROGRAM} export")
    from hvd_train.export import export  # imports torch

    target = options.target
    usual = target / "export" if target.is_dir() else target.with_name(f"{target.name}.export")
    if options.output is None and usual.is_symlink():  # the author of the run may have planted it
        raise UsageError(f"{usual} is a link, which is not followed: name a folder with --output")
    for path in export(target, options.output or usual, onnx=options.onnx, trust=options.trust):
        show(path)
    return 0
