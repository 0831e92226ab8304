"""Show the state of a run in the terminal, read from its files (`hvd-train watch`)."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hvd_train.console import printable
from hvd_train.progress.clock import duration
from hvd_train.report.facts import facts
from hvd_train.run_files.history import History, number, read, speeds, thinned
from hvd_train.run_files.journal import figure, label

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_MOST_EVENTS = 5


def watch(path: Path, *, once: bool, interval_s: float) -> None:
    """Show a run until it ends, or its state now if `once` is set.

    Raises UsageError if there is none to read.
    """
    history = read(path)
    console = Console(highlight=False)
    if once:
        console.print(view(history, time.time()))
        return
    with Live(view(history, time.time()), console=console, auto_refresh=False) as live:
        while not history.ended:
            time.sleep(interval_s)
            history = read(path)
            live.update(view(history, time.time()), refresh=True)


def view(history: History, now: float) -> RenderableType:
    """Return the picture of a run; `now` is in seconds since 1970."""
    pairs = [(name, _text(value)) for name, value in facts(history).items()]
    table = Table.grid(padding=(0, 2))
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        table.add_row(*left, *right)
    curves = Table.grid(padding=(0, 2))
    for name in dict.fromkeys(["loss", history.goal[0]]):
        for title, field, records in (
            (label(name), name, history.steps),
            (f"val {label(name)}", f"val_{name}", history.epochs),
        ):
            # a figure may be of evaluations only
            if name == "loss" or any(field in record for record in records):
                values = [number(record, field) for record in records]
                curves.add_row(_text(title), _curve(values, partial(figure, name)))
    curves.add_row(
        _text(f"{history.sample}s/s"), _curve(speeds(history.steps, _WIDTH)[1], "{:,.0f}".format)
    )
    parts: list[RenderableType] = [table, "", curves]
    silent_s = now - (history.last_write or now)
    if silent_s > 60 and not history.ended:
        parts.append(f"last record {duration(silent_s)} ago")
    for event in history.events[-_MOST_EVENTS:]:
        parts.append(_text(f"{duration(event['elapsed']):>8}  {event.get('message', '')}"))
    return Panel(Group(*parts), title=_text(history.name), title_align="left")


def _text(text: str) -> Text:
    return Text(printable(text, keep="\n\t"))  # another user may have written the file


def _curve(values: Sequence[float | None], written: Callable[[float], str]) -> str:
    """Draw a curve with block letters, and write the last value."""
    means = thinned(values, _WIDTH)
    known = [value for value in means if value is not None]
    if not known:
        return "no values"
    low = min(known)
    span = max(known) - min(known) or 1.0
    blocks = (" " if value is None else _BLOCKS[round((value - low) / span * 7)] for value in means)
    last = next(value for value in reversed(values) if value is not None)
    return (
        f"{''.join(blocks):{_WIDTH}}  "
        f"{written(last)}{'' if values[-1] is not None else ' (not the last one)'}"
    )
