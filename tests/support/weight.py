"""Weigh the code by its syntax tree, which line breaks do not change.

    python -m tests.support.weight              each part of the project
    python -m tests.support.weight hvd_train/*  each of these files and folders

A node of the tree is a name, a call, an operator and so on; docstrings and comments weigh nothing.
Tuple assignments are those of one tuple to another, `a, b = x, y`. CONTRIBUTING.md has the budget.
"""

import ast
import subprocess
import sys
from pathlib import Path

PARTS = ("hvd_train", "tests", "packaging", "benchmarks")
CONTEXTS = (ast.Load, ast.Store, ast.Del)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def weigh(source: str) -> tuple[int, int, int]:
    """Return the nodes, the lines of code and the tuple assignments of a module."""
    tree = ast.parse(source)
    nodes = tuples = 0
    prose = set()
    for node in ast.walk(tree):
        nodes += not isinstance(node, CONTEXTS)
        if isinstance(node, ast.Assign):
            sides = (node.targets[0], node.value)
            tuples += all(isinstance(side, ast.Tuple) for side in sides)
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            nodes -= 2
            prose |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        lines += bool(text) and not text.startswith("#") and number not in prose
    return nodes, lines, tuples


def main(paths: list[str]) -> None:
    """Print a line for each path."""
    print(f"{'':32} {'nodes':>8} {'lines of code':>15} {'nodes a line':>14} tuples per 1,000 lines")
    for path in paths:
        names = subprocess.check_output(["git", "ls-files", path], text=True).splitlines()
        files = [Path(name) for name in names if name.endswith(".py")]
        found = [weigh(file.read_text(encoding="utf-8")) for file in files]
        nodes, lines, tuples = map(sum, zip((0, 0, 0), *found, strict=True))
        if lines:
            print(
                f"{path:32} {nodes:8,} {lines:15,} {nodes / lines:14.2f} "
                f"{1000 * tuples / lines:22.1f}"
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(PARTS))
