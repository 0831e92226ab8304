"""`hvd-train watch`: the present state of a run in the terminal, read from its files."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvd_train.console import printable
from hvd_train.progress.clock import PHASES, WORK, duration
from hvd_train.run_files.history import History, RunReader, speeds, thinned
from hvd_train.run_files.metrics_file import number
from hvd_train.run_files.records import spreads_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _MOST_EVENTS, _RECENT_LINES = 40, 5, 10
_READING_SHARE = 0.1  # of the time may go into reading, however long the file has grown
_SHORTEST_S = 5e-6  # a phase that takes less of a step is not shown
_SILENCE_S = 60.0  # a run that has written nothing for longer is said to be silent
_END_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped; the same command goes on from there",
    "broke off": "broke off: no process is training in it, and it has not reported why",
    "unknown": "on another machine; it has not reported its end",
}


def watch(path: Path, *, once: bool, interval_s: float) -> None:
    """Show a run until it ends, or its present state where `once` is set.

    What is new is read every `interval_s` seconds at most. SIGINT and SIGTERM do what they always do, after the
    terminal has been restored. Raises UsageError where there is no run at `path`.
    """
    reader = RunReader(path)
    history = reader.read()
    console = Console(highlight=False)
    if once:
        console.print(view(history, time.time()))
        return
    # Signals wait until a picture is complete: one that came while rich writes would leave the terminal without cursor.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    received = None
    try:
        with Live(view(history, time.time()), console=console, auto_refresh=False) as live:
            while not history.ended and received is None:
                started = time.monotonic()
                history = reader.read()
                live.update(view(history, time.time()), refresh=True)
                took = time.monotonic() - started
                if not history.ended:
                    received = signal.sigtimedwait(_END_SIGNALS, max(interval_s, took / _READING_SHARE))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if received is not None:
        signal.raise_signal(received.si_signo)


def view(history: History, now: float) -> RenderableType:
    """Return the picture of a run; `now`, in seconds since 1970, tells how long it has been silent."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("state", _text(_state(history, now)))
    settings = history.settings
    facts.add_row("training", _text(f"{settings.get('model', '?')} on {settings.get('data', '?')}, {_world(history)}"))
    facts.add_row("progress", _progress(history))
    facts.add_row("speed", Text(_speed(history)))
    if spread := _over_ranks(history):
        facts.add_row("ranks", Text(spread))
    shown = list(dict.fromkeys([*history.figures[:1], history.best]))  # the loss, and what decides
    for key, before, records in (("", "", history.steps), ("val_", "val ", history.epochs)):
        for figure in shown:
            values = [number(record, f"{key}{figure.name}") for record in records]
            facts.add_row(_text(f"{before}{figure.title}"), Text(_curve(values, figure.form)))
    facts.add_row(f"{history.unit}/s", Text(_curve(speeds(history, _WIDTH)[1], ",.0f")))
    parts: list[RenderableType] = [facts]
    parts += [_text(f"missing: {gap}", style="dim") for gap in history.gaps]
    parts += [
        _text(f"{duration(event['elapsed']):>8}  {event.get('message', '')}")
        for event in history.events[-_MOST_EVENTS:]
    ]
    return Panel(Group(*parts), title=_text(history.name), title_align="left")


def _text(text: str, style: str = "") -> Text:
    """Return text from the files of a run, which may be anybody's, without what a terminal would obey."""
    return Text(printable(text, keep="\n\t"), style=style)


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """Return a curve of at most `width` block letters, from the lowest value to the highest; a gap is a blank."""
    _, means = thinned(values, values, width)
    known = [value for value in means if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    heights = (None if value is None else round((value - low) / span * 7) if span else 0 for value in means)
    return "".join(" " if height is None else _BLOCKS[height] for height in heights)


def seconds_left(history: History) -> float | None:
    """Estimate how long training still takes, by its recent speed and without the evaluations to come.

    None where the run has ended, or where its speed or its length is not known.
    """
    total, done = _samples(history)
    speed = _recent_speed(history)
    if history.state != "running" or not (total and speed):
        return None
    left = max(0.0, total - done) / speed
    limit = history.total_seconds
    return left if limit is None else min(left, max(0.0, limit - history.seconds))


def _state(history: History, now: float) -> str:
    text = _STATES[history.state]
    if history.state == "finished" and history.summary.get("why") not in (None, "done"):
        text += f": {history.summary['why']}"
    silent = now - history.last_write if history.last_write is not None else 0.0
    return f"{text}; last heard of {duration(silent)} ago" if not history.ended and silent > _SILENCE_S else text


def _world(history: History) -> str:
    size = history.world_size
    return f"{size} rank{'s' if size != 1 else ''}" if size else "ranks not known"


def _samples(history: History) -> tuple[float, float]:
    """Return how many samples the whole run takes (0 where that is not known) and how many it has taken."""
    per_epoch = history.samples_per_epoch or 0
    steps = max((number(step, "samples") or 0.0 for step in history.steps), default=0.0)
    epochs = max((number(epoch, "epoch") or 0.0 for epoch in history.epochs), default=0.0)
    return float(per_epoch * (history.num_epochs or 0)), max(steps, epochs * per_epoch)


def _progress(history: History) -> RenderableType:
    total, done = _samples(history)
    epoch = max((int(number(r, "epoch") or 0) for r in (*history.steps, *history.epochs)), default=0)
    step = max((int(number(r, "step") or 0) for r in (*history.steps, *history.epochs)), default=0)
    text = f"epoch {epoch} of {history.num_epochs or '?'}, step {step:,}"
    if not total:
        return Text(text)
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total, done, width=_WIDTH), Text(f"{min(1.0, done / total):.0%}, {text}"))
    return row


def _recent_speed(history: History) -> float | None:
    """Return images/s over the last few lines of the run; None where they do not tell."""
    _, recent = speeds(replace(history, intervals=history.intervals[1 - _RECENT_LINES :]), 1)
    return recent[0] if recent else None


def _speed(history: History) -> str:
    speed = _recent_speed(history)
    text = f"{speed:,.0f} {history.unit}/s" if speed else "not known yet"
    left = seconds_left(history)
    return f"{text}, {duration(history.seconds)} so far" + (f", about {duration(round(left))} left" if left else "")


def _over_ranks(history: History) -> str:
    """Return how far the ranks were apart at last; empty where no record says."""
    spreads = next((spreads for record in reversed(history.steps) if (spreads := spreads_of(record))), {})
    if WORK not in spreads:
        return ""
    work = spreads.pop(WORK)
    phases = "  ".join(
        f"{phase} {1e3 * spreads[phase].most:.3g}/{1e3 * spreads[phase].median:.3g}"
        for phase in PHASES
        if phase in spreads and spreads[phase].most >= _SHORTEST_S
    )
    return (
        f"rank {work.slowest} is the slowest: {1e3 * work.most:.3g} ms of own work in a step, the others "
        f"{1e3 * work.median:.3g} ms\nslowest/median in ms: {phases}"
    )


def _curve(values: Sequence[float | None], form: str) -> str:
    last = next((value for value in reversed(values) if value is not None), None)
    if last is None:
        return "no values"
    gap = "" if values[-1] is not None else " (the last one is no number, or was not measured)"
    return f"{sparkline(values):{_WIDTH}}  {format(last, form)}{gap}"
