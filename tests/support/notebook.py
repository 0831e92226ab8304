"""Runs the notebook in examples/ as its reader would, in a folder of its own.

python -m tests.support.notebook    runs examples/results.ipynb and writes what its cells show into it
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parents[2] / "examples" / "results.ipynb"
LIMIT_S = 240  # of a cell, on a machine that does other things as well


def executed(folder: Path) -> NotebookNode:
    """Return the notebook with what its cells show when they are run in `folder`.

    Raises CellExecutionError, with the traceback, where one fails.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=LIMIT_S,
        startup_timeout=LIMIT_S,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook


def without_noise(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook with metadata that are the same whoever has run it."""
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        nbformat.write(without_noise(executed(Path(scratch))), NOTEBOOK)
