"""The rooms of the package in their order, and what the imports in the code say about them.

python -m tests.support.rooms          prints the rooms with the number of imports between them
python -m tests.support.rooms --write  renews the table in docs/architecture.md
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import hvd_train

PACKAGE = Path(hvd_train.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"

# From the bottom up: a room imports only from those before it. A name with modules beside it stands for these modules
# at the top level; any other one is a folder. What a room is for is said in its __init__.py.
ROOMS: dict[str, tuple[str, ...]] = {
    "vocabulary": (
        *("_version", "travel", "errors", "console", "numerals", "other_flags", "plain_file", "plain_yaml"),
        *("remote_url", "settings", "config", "config_file", "recipes", "flag_values", "flags", "help_page"),
        *("plugin", "user_code", "weights_file"),
    ),
    "progress": (),
    "launch": (),
    "elastic": (),
    "world": (),
    "doctor": (),
    "data": (),
    "network": (),
    "tasks": (),
    "run_files": (),
    "profiling": (),
    "the story": (
        *(
            "suspicions",
            "state",
            "handover",
            "transfer",
            "checkpoint",
            "rank_times",
            "step",
            "by_task",
            "validate",
            "parts",
            "output",
            "job",
            "goals",
            "recheck",
        ),
        "loop",
        *("membership", "last_commit", "result", "training", "run", "own_loop", "export", "predict"),
    ),
    "report": (),
    "bench": (),
    "commands": (),
    "the front door": ("cli", "__main__"),
}
AT_THE_TOP = {
    "vocabulary": "What a run can be, and what can go wrong: the config, its recipes and flags, the errors. No torch.",
    "the story": "What training is. Read `loop`, then `step`, `state`, `parts` and `training`.",
    "the front door": "`hvd-train COMMAND`: finds the command, turns errors into lines and exit codes.",
}


def modules() -> list[str]:
    """Return all modules of the package, dotted, without the package's name and without any `__init__`."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts) for path in paths if path.name != "__init__")


def room_of(module: str) -> str | None:
    """Return the room that a module is in, or None where it is in none."""
    for room, members in ROOMS.items():
        if module in members or (not members and module.startswith(f"{room}.")):
            return room
        if any(module.startswith(f"{member}.") for member in members):
            return room
    return None


def imported_by(module: str) -> set[str]:
    """Return what a module imports anywhere in it: our modules without the package's name, others by their first."""
    targets = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            targets |= {f"{node.module}.{alias.name}" for alias in node.names}
    known, found = set(modules()), set()
    for target in targets:
        first, *parts = target.split(".")
        if first != "hvd_train":
            found.add(first)
            continue
        while parts and ".".join(parts) not in known:
            parts.pop()
        found.add(".".join(parts) or "hvd_train")
    return found


def arrows() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports; `hvd_train` is the package itself."""
    known = {*modules(), "hvd_train"}
    return {module: imported_by(module) & known for module in modules()}


def upward() -> list[str]:
    """Return the imports that climb: from a module in a lower room to one in a higher room, or to the package."""
    order = {room: number for number, room in enumerate(ROOMS)}
    return [
        f"{module} ({room_of(module)}) imports {target} ({room_of(target) or 'the package'})"
        for module, targets in arrows().items()
        for target in sorted(targets)
        if order.get(room_of(target) or "", len(order)) > order[room_of(module) or ""]
    ]


def circle() -> list[str]:
    """Return the modules of a circle of imports, in their order; none where there is no circle."""
    left = arrows()
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    path = list(left)[:1]
    while path and len(set(path)) == len(path):
        path.append(min(left[path[-1]] & left.keys()))
    return path[path.index(path[-1]) :] if path else []


def purpose(room: str) -> str:
    """Return what a room is for: the first line of its `__init__.py`."""
    if room in AT_THE_TOP:
        return AT_THE_TOP[room]
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    return text.splitlines()[0]


def table() -> str:
    """Return the rooms as a Markdown table, from the bottom up."""
    rows = ["| room | modules | what the reader finds |", "|---|---|---|"]
    for room, members in ROOMS.items():
        inside = [module for module in modules() if room_of(module) == room]
        names = members or tuple(module.removeprefix(f"{room}.") for module in inside)
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {room if members else f'`{room}/`'} | {listed} | {purpose(room)} |")
    return "\n".join(rows)


def page() -> str:
    """Return docs/architecture.md with the table as the code has it now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def measures() -> str:
    """Return three lines about the size of the code: the longest file, the longest function, the docstrings."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    lines, path = max((len(text.splitlines()), path.name) for path, text in texts.items())
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    length, function = max(((node.end_lineno or 0) - node.lineno + 1, node.name) for node in functions)
    documented = (ast.get_docstring(node) for node in nodes if isinstance(node, Documented))
    words = [len(text.split()) for text in documented if text]
    return (
        f"longest file: {path}, {lines} lines\nlongest function: {function}, {length} lines\n"
        f"{len(words)} docstrings of {sum(words) / len(words):.1f} words, {sum(count <= 5 for count in words)} of them "
        "have five words or fewer"
    )


def main() -> None:
    """Print the rooms, the imports between them and the size of the code, or renew the page."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
        return
    pairs = Counter((room_of(module), room_of(target)) for module, to in arrows().items() for target in to)
    for room in ROOMS:
        down = {to: count for (source, to), count in pairs.items() if source == room and to not in (room, None)}
        size = sum(room_of(module) == room for module in modules())
        listed = ", ".join(f"{to} {down[to]}" for to in ROOMS if to in down)
        print(f"{room:15} {size:3} modules, {pairs[room, room]:3} imports inside; imports from: {listed or 'nothing'}")
    between = sum(count for (source, to), count in pairs.items() if source != to)
    print(measures())
    print(f"{between} imports between rooms, {len(upward())} of them upward; circle: {circle() or 'none'}")


if __name__ == "__main__":
    main()
