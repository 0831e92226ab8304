"""`hvd-train export`: a trained model for use elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train import remote_url
from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of

USAGE = """\
  export RUN|FILE          weights and a program of the trained model
"""


@dataclass(frozen=True)
class ExportOptions:
    """Write the best weights of a run, or a checkpoint's, as weights.pt, model.pt2 (torch.export) and model.json."""

    target: Annotated[Path, tyro.conf.Positional]
    """Run folder, checkpoint file, or the file model-best or model-final of a run folder."""
    output: Path | None = None
    """Folder for the files; default: RUN/export, CHECKPOINT.export, or here for a run at a URL."""
    onnx: bool = False
    """Also write model.onnx (pip install onnx onnxscript onnxruntime)."""
    trust: bool = False
    """Import the code that the run names as its model or data: it can do here whatever you can."""


def run(arguments: list[str]) -> int:
    """Export the model, print the path of each file that was written and return 0.

    Raises UsageError where the target holds no model, or where the model cannot be exported.
    """
    options = parse_flags(ExportOptions, arguments, f"{PROGRAM} export")
    from hvd_train.export import export  # imports torch, which parsing can do without

    target = options.target
    usual = target / "export" if target.is_dir() else target.with_name(f"{target.name}.export")
    if remote_url.url_of(target):
        usual = Path(usual.name)
    if options.output is None and usual.is_symlink():  # planted by whoever has made the run
        raise UsageError(f"{usual} is a link, which is not followed: name a folder with --output")
    for path in export(target, options.output or usual, onnx=options.onnx, trust=options.trust):
        show(path)
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train export runs/NAME", "hvd-train export runs/NAME --onnx --output exported")
    return page_of(ExportOptions, "export RUN|FILE [FLAGS]", examples, "RUN|FILE")
