"""What a run has reached, in words, for the page and the terminal."""

from statistics import fmean

from hvd_train.progress.clock import duration
from hvd_train.run_files.history import LARGEST, History, number, numbers
from hvd_train.run_files.journal import figure, label


def facts(run: History) -> dict[str, str]:
    """Return the names and values of the facts of a run."""
    name, higher = run.goal
    evaluated = [epoch for epoch in run.epochs if number(epoch, f"val_{name}") is not None]
    best = "not evaluated"
    if evaluated:
        chosen = (max if higher else min)(evaluated, key=lambda epoch: epoch[f"val_{name}"])
        best = f"{figure(name, chosen[f'val_{name}'])} (epoch {chosen.get('epoch', '?')})"
    losses = numbers(run.epochs, "val_loss")
    test = number(run.summary, f"test_{name}")
    speeds = numbers((*run.steps, *run.epochs, run.summary), "samples_per_second")
    speed = next(filter(None, reversed(speeds)), None)
    epochs = run.num_epochs
    done = run.furthest("epochs_done")
    time = duration(run.seconds)
    if speed and epochs and run.samples_per_epoch and run.state == "running":
        left = min(max(0.0, epochs - done) * run.samples_per_epoch / speed, LARGEST)
        time += f", about {duration(round(left))} left without evaluations"
    times = numbers(run.epochs, "seconds")
    return {
        f"best val {label(name)}": best,
        "last val loss": f"{losses[-1]:.4f}" if losses else "none",
        f"test {label(name)}": "no test" if test is None else figure(name, test),
        "state": run.state,
        "model": str(run.settings.get("model", "not set")),
        "data": str(run.settings.get("data", "not set")),
        "workers": f"{run.world_size or '?'}{_spread(run)}",
        "epochs": f"{done:.4g} of {epochs or '?'}",
        "steps": f"{run.furthest('step'):,.0f}",
        "samples/s": f"{speed:,.0f}" if speed else "unknown",
        "time": time,
        "peak memory": _memory(run),
        "an epoch": duration(fmean(times)) if times else "unknown",
        "skipped steps": f"{run.furthest('skipped_steps'):,.0f}",
    }


def _spread(run: History) -> str:
    """Return how long the slowest rank and the median rank work in a step, if known."""
    spreads = run.mappings("ranks")
    slowest = numbers(spreads, "slowest")
    median = numbers(spreads, "median")
    if not (slowest and median):
        return ""
    slowest_ms, median_ms = 1000 * slowest[-1], 1000 * median[-1]
    return f" (work in a step: slowest {slowest_ms:.3g} ms, median {median_ms:.3g} ms)"


def _memory(run: History) -> str:
    """Return the peak memory of a rank, and the mean load of rank 0's GPU."""
    peaks = numbers((*run.epochs, run.summary), "peak_memory_gib")
    facts = [f"{max(peaks):.2f} GiB a rank"] if any(peaks) else []
    loads = run.mappings("gpu")
    for name, form in (("utilization", "GPU {:.0%} busy"), ("power_w", "{:.0f} W")):
        if values := numbers(loads, name):
            facts.append(form.format(fmean(values)))
    return ", ".join(facts) or "unknown"
