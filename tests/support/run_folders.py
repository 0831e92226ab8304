"""Run folders as trainings leave them, and their report pages."""

import base64
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from hvd_train import config_file, recipes
from hvd_train.report import report

SAMPLES = 1000
BATCH = 100
START = 1.8e9
NOW = datetime(2026, 1, 2, 3, 4)


def start(time: float = 0.0, **facts: Any) -> dict[str, Any]:
    known = {"world_size": 2, "num_samples": SAMPLES, "seed": 0}
    return event("start", time, message="a net on digits", **{**known, **facts})


def event(name: str, time: float, message: str = "something", **facts: Any) -> dict[str, Any]:
    return {"kind": "event", "time": START + time, "name": name, "message": message, **facts}


def step(number: int, time: float | None = None, **changes: Any) -> dict[str, Any]:
    """Return a step of 100 samples; steps are one second apart."""
    return {
        "kind": "step",
        "time": START + (number if time is None else time),
        "epoch": (number - 1) * BATCH // SAMPLES + 1,
        "step": number,
        "samples": number * BATCH,
        "loss": 2.0 / number,
        "top1": 1 - 1 / number,
        "top5": 1.0,
        "samples_per_second": 100.0,
        "learning_rate": 0.1,
        "gradient_norm": 1.0,
        "loss_scale": None,
        "skipped_steps": 0,
        **changes,
    }


def epoch(number: int, time: float | None = None, **changes: Any) -> dict[str, Any]:
    """Return the end of an epoch of ten steps with an evaluation."""
    return {
        "kind": "epoch",
        "time": START + (number * 10 + 0.5 if time is None else time),
        "epoch": number,
        "step": number * 10,
        "loss": 1.0 / number,
        "top1": 0.5,
        "top5": 1.0,
        "samples_per_second": 100.0,
        "seconds": 10.5,
        "val_loss": 0.9 / number,
        "val_top1": 0.6,
        "val_top5": 1.0,
        **changes,
    }


def whole_run(epochs: int = 3) -> list[dict[str, Any]]:
    lines = [start()]
    for number in range(1, 10 * epochs + 1):
        lines += [step(number)] if number % 10 else [step(number), epoch(number // 10)]
    return [*lines, event("end", epochs * 10 + 1, "done: top-1 60.00%")]


def elastic_run() -> list[dict[str, Any]]:
    """Return the lines of an elastic run that loses a rank, recovers it, stops and resumes."""
    facts = {"why": "a rank was lost", "seconds": 3.5, "steps_lost": 0}
    return [
        *(start(), step(1), step(2), step(3)),
        event("world", 7, step=4, previous_size=3, world_size=2, **facts),
        *(step(4, 7.1), step(5, 8)),
        event("world", 9, step=6, previous_size=2, world_size=2, **facts),
        *(step(number, 3.1 + number) for number in range(6, 11)),
        event("end", 13.5, "stopped by SIGINT at step 10, committed"),
        *(start(500), step(11, 501), step(12, 502)),
    ]


def write(
    path: Path,
    lines: list[dict[str, Any]],
    *,
    torn: str = "",
    summary: bool = False,
    **settings: Any,
) -> Path:
    """Write a run folder with these metrics and the torn line `torn`; return its path."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        config_file.dump(recipes.digits().replace(**{"epochs": 3, **settings}))
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    if summary:
        facts = {"finished": True, "why": "done", "test_top1": 0.55, "samples_per_second": 101.0}
        (path / "summary.json").write_text(json.dumps(facts))
    return path


def composed(*paths: Path) -> str:
    return report.compose(paths, NOW)


def section(text: str, heading: str) -> str:
    """Return the markup of a section, with the SVG of its charts as text."""
    found = re.search(rf"<section[^>]*>\s*<h2>{heading}</h2>(.*?)</section>", text, re.DOTALL)
    assert found is not None, heading
    return re.sub(
        r"data:image/svg\+xml;base64,([^\"]*)",
        lambda image: base64.b64decode(image[1]).decode(),
        found[1],
    )
