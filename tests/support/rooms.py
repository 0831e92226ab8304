"""The rooms of the package in order.

`python -m tests.support.rooms --write` renews docs/architecture.md.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import hvd_train

PACKAGE = Path(hvd_train.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
BEGIN = "<!-- rooms: begin -->"
END = "<!-- rooms: end -->"

# From the bottom up. A room without modules here is a folder; other rooms consist of top-level
# modules.
ROOMS: dict[str, tuple[str, ...]] = {
    "vocabulary": (
        *("_version", "errors", "console", "plain_file"),
        *("config", "config_file", "recipes", "flags", "plugin"),
    ),
    **dict.fromkeys(
        (
            "progress",
            "launch",
            "elastic",
            "world",
            "doctor",
            "data",
            "network",
            "tasks",
            "run_files",
        ),
        (),
    ),
    "the story": (
        *(
            "history",
            "state",
            "replicas",
            "checkpoint",
            "updater",
            "validate",
            "profiling",
            "parts",
            "output",
            "result",
        ),
        *("batches", "membership", "records", "end", "loops", "loop", "run", "session"),
        *("export", "proof"),
    ),
    **dict.fromkeys(("report", "bench", "commands"), ()),
    "the front door": ("cli", "__main__"),
}
AT_THE_TOP = {
    "vocabulary": (
        "What a run can be, and what can go wrong: the config, its recipes and flags, "
        "the errors. No torch."
    ),
    "the story": (
        "What training is. Read `loop`, `session`, `loops`, `history`, `updater` and `membership`."
    ),
    "the front door": (
        "`hvd-train COMMAND`: finds the command, turns errors into lines and exit codes."
    ),
}


def modules() -> list[str]:
    """Return all modules of the package, without its name and `__init__`."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts) for path in paths if path.name != "__init__")


def room_of(module: str) -> str | None:
    for room, members in ROOMS.items():
        if module.split(".")[0] in (members or (room,)):
            return room
    return None


def imported_by(module: str) -> set[str]:
    """Return the imports of a module: ours without the package's name,
    others by their first name.
    """
    targets = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            targets |= {f"{node.module}.{alias.name}" for alias in node.names}
    known = set(modules())
    found = set()
    for target in targets:
        first, *parts = target.split(".")
        if first != "hvd_train":
            found.add(first)
            continue
        while parts and ".".join(parts) not in known:
            parts.pop()
        found.add(".".join(parts) or "hvd_train")
    return found


def upward() -> list[str]:
    """Return the imports from a lower room of a higher room or the package itself."""
    order = {module: list(ROOMS).index(room_of(module)) for module in modules()} | {
        "hvd_train": len(ROOMS)
    }
    return [
        f"{module} imports {target}"
        for module in modules()
        for target in imported_by(module) & order.keys()
        if order[target] > order[module]
    ]


def circle() -> list[str]:
    """Return the modules of an import cycle, or none."""
    try:
        TopologicalSorter(
            {module: imported_by(module) & {*modules()} for module in modules()}
        ).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def purpose(room: str) -> str:
    """Return the first paragraph of a room's `__init__.py`."""
    if room in AT_THE_TOP:
        return AT_THE_TOP[room]
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    return " ".join(text.partition("\n\n")[0].splitlines())


def table() -> str:
    rows = ["| room | modules | what the reader finds |", "|---|---|---|"]
    for room, members in ROOMS.items():
        inside = [module for module in modules() if room_of(module) == room]
        names = members or tuple(module.removeprefix(f"{room}.") for module in inside)
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {room if members else f'`{room}/`'} | {listed} | {purpose(room)} |")
    return "\n".join(rows)


def page() -> str:
    """Return docs/architecture.md with the current table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
