"""Where the time of recorded steps went on one rank: by phases, by operators, and what the reduction waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvd_train.profiling.trace import Span

_LISTED_COSTS = 10
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Cost:
    """The time that an operator took in all its calls together, without the operators that it called."""

    name: str
    milliseconds: float
    calls: int


def costs(spans: Sequence[Span]) -> list[Cost]:
    """Return the cost of each operator; where a GPU has worked, the cost of each of its kernels instead."""
    own_ns: dict[str, int] = {}
    calls: dict[str, int] = {}
    on_gpu = any(span.on_gpu for span in spans)
    running: dict[str, list[Span]] = {}  # on each track, from the outermost to the innermost
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.on_gpu != on_gpu:
            continue
        length, outer = span.end - span.start, running.setdefault(span.track, [])
        while outer and outer[-1].end <= span.start:
            outer.pop()
        if outer and not on_gpu:
            own_ns[outer[-1].name] -= length
        outer.append(span)
        own_ns[span.name], calls[span.name] = own_ns.get(span.name, 0) + length, calls.get(span.name, 0) + 1
    return [Cost(name, spent / _NS_PER_MS, calls[name]) for name, spent in own_ns.items()]


def summary(steps: Sequence[Span], phases: Sequence[Span], costs: Sequence[Cost], horovod: Sequence[Span]) -> list[str]:
    """Return the lines that the user reads: phases, the largest costs, and the reduction that nothing hides."""
    total_ms = sum(step.end - step.start for step in steps) / _NS_PER_MS
    lines = [f"  {'phase':<44} {'ms a step':>10} {'share':>6}"]
    for name in dict.fromkeys(span.name for span in phases):
        spent_ms = sum(span.end - span.start for span in phases if span.name == name) / _NS_PER_MS
        lines.append(f"  {name:<44} {spent_ms / len(steps):10.2f} {spent_ms / total_ms:6.1%}")
    lines.append(f"  {f'the {_LISTED_COSTS} largest costs':<44} {'total ms':>10} {'share':>6} {'calls':>7}")
    for cost in sorted(costs, key=lambda cost: -cost.milliseconds)[:_LISTED_COSTS]:
        share = cost.milliseconds / total_ms
        lines.append(f"  {cost.name[:44]:<44} {cost.milliseconds:10.2f} {share:6.1%} {cost.calls:7}")
    waits = [span for span in phases if span.name == "reduction"]
    return [*lines, f"  {_exposed_reduction(steps, waits, horovod, total_ms)}"]


def _exposed_reduction(steps: Sequence[Span], waits: Sequence[Span], horovod: Sequence[Span], total_ms: float) -> str:
    """Return the line about the time that steps wait for the reduction, and what Horovod does in that time."""
    waited_ms = sum(wait.end - wait.start for wait in waits) / _NS_PER_MS
    line = f"exposed reduction: {waited_ms / len(steps):.2f} ms a step ({waited_ms / total_ms:.1%})"
    if not waits or not horovod:
        return line
    longest = max(waits, key=lambda wait: wait.end - wait.start)
    step = next((step.name for step in steps if step.start <= longest.start < step.end), "")
    shares = {
        name: sum(_overlap([span for span in horovod if span.name == name], wait) for wait in waits)
        / _NS_PER_MS
        / waited_ms
        for name in dict.fromkeys(span.name for span in horovod)
    }
    largest = sorted(shares.items(), key=lambda item: -item[1])
    activities = [f"{name} {share:.0%}" for name, share in largest if share >= 0.01]
    last = max((s for s in horovod if longest.start < s.end <= longest.end), key=lambda s: s.end, default=None)
    line += f", longest in {step} ({(longest.end - longest.start) / _NS_PER_MS:.2f} ms"
    line += f", until {last.track})" if last else ")"
    return f"{line}; meanwhile in Horovod: {', '.join(activities) or 'nothing'}"


def _overlap(spans: Iterable[Span], window: Span) -> int:
    """Return the nanoseconds within the window in which at least one of the spans goes on."""
    covered, reached = 0, window.start
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, window.end)
        if end > start:
            covered, reached = covered + end - start, end
    return covered
