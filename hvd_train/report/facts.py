"""What a run has reached, in words, for the page and the terminal."""

from hvd_train.progress.clock import duration
from hvd_train.run_files.history import LARGEST, History, number
from hvd_train.run_files.journal import figure, label


def facts(run: History) -> dict[str, str]:
    """Return the names and values of the facts of a run."""
    name, higher = run.goal
    scores = [
        (score, epoch)
        for epoch in run.epochs
        if (score := number(epoch, f"val_{name}")) is not None
    ]
    best = (max if higher else min)(scores, key=lambda scored: scored[0], default=None)
    losses = [loss for epoch in run.epochs if (loss := number(epoch, "val_loss")) is not None]
    test = number(run.summary, f"test_{name}")
    known = [
        speed
        for record in (*run.steps, *run.epochs)
        if (speed := number(record, "samples_per_second"))
    ]
    speed = number(run.summary, "samples_per_second") or (known[-1] if known else None)
    epochs = run.num_epochs
    done = run.furthest("epochs_done")
    time = duration(run.seconds)
    if speed and epochs and run.samples_per_epoch and run.state == "running":
        left = min(max(0.0, epochs - done) * run.samples_per_epoch / speed, LARGEST)
        time += f", about {duration(round(left))} left without evaluations"
    times = [seconds for epoch in run.epochs if (seconds := number(epoch, "seconds"))]
    found = (
        f"{figure(name, best[0])} (epoch {best[1].get('epoch', '?')})" if best else "not evaluated"
    )
    return {
        f"best val {label(name)}": found,
        "last val loss": f"{losses[-1]:.4f}" if losses else "none",
        f"test {label(name)}": "no test" if test is None else figure(name, test),
        "state": run.state,
        "model": str(run.settings.get("model", "not set")),
        "data": str(run.settings.get("data", "not set")),
        "workers": str(run.world_size or "?"),
        "epochs": f"{done:.4g} of {epochs or '?'}",
        "steps": f"{run.furthest('step'):,.0f}",
        "samples/s": f"{speed:,.0f}" if speed else "unknown",
        "time": time,
        "peak memory": _memory(run),
        "an epoch": duration(sum(times) / len(times)) if times else "unknown",
        "skipped steps": f"{run.furthest('skipped_steps'):,.0f}",
    }


def _memory(run: History) -> str:
    """Return the peak memory of a rank, and the mean load of rank 0's GPU."""
    peaks = [
        peak for record in (*run.epochs, run.summary) if (peak := number(record, "peak_memory_gib"))
    ]
    facts = [f"{max(peaks):.2f} GiB a rank"] if peaks else []
    for name, form in (("utilization", "GPU {:.0%} busy"), ("power_w", "{:.0f} W")):
        loads = (step["gpu"] for step in run.steps if isinstance(step.get("gpu"), dict))
        if values := [value for load in loads if (value := number(load, name)) is not None]:
            facts.append(form.format(sum(values) / len(values)))
    return ", ".join(facts) or "unknown"
