"""Write docs/benchmarks.md from the records: `python -m benchmarks.page`, the last step of `make bench`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

`make bench` writes this page from the records in `benchmarks/records/` (`benchmarks/page.py`): do not edit it.
`make bench-quick` shows the ratios in less than five minutes. Programs that are compared take turns of a few steps on
the same machine (`benchmarks/turns.py`). A value is the median over the turns, or over several starts of both, with its
95% bootstrap interval in brackets. *met* and *not met* mean that the whole interval is on one side of the aim.

Only the last section ran on a GPU, and nothing on this page ran on several machines.
"""


@dataclass(frozen=True)
class Section:
    """A section of the page: its title, the name of its record, and what was measured."""

    title: str
    record: str
    text: str


@dataclass(frozen=True)
class Row:
    """A line of a table: what was measured, its value, the aim and whether it is met."""

    what: str
    value: str
    aim: str = ""
    verdict: str = ""


SECTIONS = [
    Section(
        "Training steps",
        "speed",
        "Images per second of our loop, divided by those of another program: a bare Horovod loop, a loop with torch's "
        "DistributedDataParallel under torchrun, and one in the style of Horovod's published examples (each in "
        "`benchmarks/bare.py`). Two ranks train ResNet-18 with images of 32 pixels, or the small network of "
        "the digits recipe.",
    ),
    Section(
        "A step's own cost",
        "own-cost",
        "How many microseconds a step of ours takes longer than one of the bare Horovod loop: the digits recipe's "
        "network, one rank, both in the same process in turns of an epoch.",
    ),
    Section(
        "Where a step goes",
        "throughput-gloo",
        "The time of a step by phase: ResNet-18, images of 32 pixels, 30 on each of two ranks, over Gloo. The "
        "reduction is the part that the backward pass did not hide.",
    ),
    Section("The same over MPI", "throughput-mpi", "As above."),
    Section(
        "The same for the digits recipe",
        "throughput-convnet",
        "Its own network of 0.09 million parameters, 30 images on each of two ranks, over Gloo.",
    ),
    Section(
        "Input",
        "input",
        "Images per second of processor time, divided by those of torchvision's `ImageFolder` (in memory: of a data "
        "set item by item) with the usual transforms of PIL images in a DataLoader. JPEG files of 500 x 375 pixels "
        "become random crops of 224, as a device takes them (uint8; the device normalises); images of 32 x 32 in "
        "memory get padding, crop and mirror. Our crops are torchvision's: the same random numbers give the same "
        "pixels.",
    ),
    Section(
        "Gradients as fp16 on a slow link",
        "wire",
        "Steps per second, divided by those with fp32: VGG-11 (129 million parameters), images of 32 pixels, 8 on each "
        "rank, two hosts in network namespaces with 1 Gbit/s between them.",
    ),
    Section(
        "Accuracy with gradients as fp16",
        "wire-accuracy",
        "Top-1 of the digits recipe after its last epoch on two ranks: the median over seeds, with the lowest and the "
        "highest in brackets (for the difference, the 95% interval of its median). Of 360 held-out images one is "
        "0.28%.",
    ),
    Section(
        "Commits",
        "ready-commits",
        "What checkpoints in the background cost a training of ResNet-50 on two busy cores, at the default cadence.",
    ),
    Section(
        "Ready for faults",
        "ready-elastic",
        "Seconds per step of an elastic world, divided by those of a static one, while nothing happens: with steps "
        "that wait, as for a GPU, and with a ResNet-50 that keeps both cores busy.",
    ),
    Section(
        "Recovery",
        "recovery-ours",
        "Seconds from a fault to the next step, measured from outside, on three hosts in network namespaces "
        "([elastic.md](elastic.md)).",
    ),
    Section(
        "Surviving at size",
        "at-size",
        "What a change of world and a commit wait for: the digest of a state of 2 GB, and the files of a run of "
        "ImageNet (5,005 steps of 256 samples an epoch) with `--ledger`, as a new rank 0 opens them.",
    ),
    Section(
        "Start-up",
        "startup",
        "From `horovodrun -np 2` to the end of the first step, beside `import torch` alone in the same turn. "
        "torchvision's networks take longer, since importing them brings torch's compiler.",
    ),
    Section(
        "Order of samples",
        "order",
        "A simulated epoch of 10^9 samples on 1,024 ranks: the time of a sample, the time to resume at any cursor, and "
        "the memory.",
    ),
    Section(
        "On a GPU",
        "gpu-check",
        "`make gpu-check` on one NVIDIA H200, whose ranks share it (NCCL 2.30). Sums are compared with exact ones. The "
        "difference of a training is the distance of its weights from those of fp32 on the CPU, over the distance that "
        "training has moved them. Speeds are of ResNet-50 with images of 224 pixels in batches of 208, our step "
        "over that of a bare loop. NCCL between several GPUs has not run.",
    ),
]


def rows_of(name: str, record: dict[str, Any]) -> list[Row]:
    """Return the lines of a record's table."""
    if name == "ready-commits":
        share = record["commit_share_of_time"]
        return [Row("a commit a minute, share of the time", f"{share:.2%}", "under 1%", verdict(share < 0.01))]
    if name == "ready-elastic":
        return list(_measured(record["elastic_over_static"]))
    if name == "wire-accuracy":
        rows = [
            Row(wire, f"{statistics.median(scores):.2%} ({min(scores):.2%} to {max(scores):.2%})")
            for wire, scores in record["top1_of_seeds"].items()
        ]
        low, high = record["interval"]
        difference = f"{record['difference']:.2%} ({low:.2%} to {high:.2%})"
        return [*rows, Row("fp16 less fp32, with the same seed", difference, record["aim"], record["verdict"])]
    if name == "recovery-ours":
        return [Row(what, f"{statistics.median(times):.2f} s") for what, times in record["seconds"].items()]
    if name.startswith("throughput"):
        speed = value(record["images_per_second"], record["images_per_second_interval"])
        phases = [Row(phase, f"{seconds * 1000:.1f} ms") for phase, seconds in record["split"].items()]
        return [Row("images a second", speed), *phases]
    if name == "input":
        return list(_inputs(record))
    if name == "gpu-check":
        findings = [one for one in record["findings"] if one["stage"] != "doctor" or one["verdict"] == "failed"]
        return [Row(f"{one['stage']}: {one['check']}", one["what"], "", one["verdict"]) for one in findings]
    if name == "wire":
        return list(_measured({"fp16 over fp32": record}))
    return list(_measured(record))


def remark(name: str, record: dict[str, Any]) -> str:
    """Return why an aim is not met, with the numbers that show it, or where the time of a step's own cost goes."""
    missed = any(row.verdict == "not met" for row in rows_of(name, record))
    if name == "input" and missed:
        spent = record["quality 90"]["microseconds_per_image"]
        whole = spent["decode all with the same library"]
        entropy = spent["of that, read the entropy code (decoded at 1/8)"]
        return (
            f"Why not 2.0 with the larger files: of the {whole} microseconds that a whole file takes to decode, "
            f"{entropy} go into its entropy code, which has to be read down to the lower edge of the crop, at 86% of "
            "the height on average. "
            f"Ours takes {spent['ours: decode the part and resize']} microseconds to decode and resize, the usual way "
            f"{spent['usual: open and decode']} and {spent['usual: crop and resize']}."
        )
    if name == "own-cost":
        parts = ", ".join(f"{part} {number}" for part, number in record["microseconds_of_parts"].items())
        return (
            f"Where the time goes, in microseconds of a step: {parts}. The bare loop also has to take a batch, and "
            "needs longer for its update, which is not fused."
        )
    if name == "speed" and missed:
        split = json.loads((RECORDS / "throughput-convnet.json").read_text())["split"]
        return (
            "Why not more: what our loop does beyond the bare one (below) takes longer beside a second rank, like "
            "everything on two busy cores, and the time that one rank loses the other waits for: "
            f"{split['reduction'] * 1000:.1f} ms of each step of the digits network (below). Steps that compute more "
            "hide both."
        )
    if name == "wire" and missed:
        seconds = record["seconds_per_step"]
        return (
            "Why not 1.6: the wire alone needs 4.1 s a step for fp32 and 2.06 s for fp16 (129 million numbers at "
            f"1 Gbit/s each way); the steps took {seconds['fp32']:.1f} and {seconds['fp16']:.1f} s. The rest of a "
            "step, its passes and the update of 129 million parameters on one core for each rank, takes both as long."
        )
    return ""


def _inputs(record: dict[str, Any]) -> Iterator[Row]:
    for quality in (name for name in record if name.startswith("quality ")):
        files = f"JPEG of {record[quality]['bytes_per_file'] / 1000:.0f} KB"
        comparisons = {kind: value for kind, value in record[quality].items() if isinstance(value, dict)}
        yield from _measured({f"{files}, {kind}": value for kind, value in comparisons.items()})
    yield from _measured({"in memory": record["memory"]})


def _measured(record: dict[str, Any]) -> Iterator[Row]:
    """Yield a line for everything in a record that has an aim, a median or a ratio."""
    for what, result in record.items():
        entries = (
            result if isinstance(result, list) else [{"comparison": what, **result}] if isinstance(result, dict) else []
        )
        for entry in entries:
            if isinstance(entry, dict) and ("aim" in entry or "median" in entry or "ratio" in entry):
                number = entry.get("ratio", entry.get("median"))
                aim = entry.get("aim", "")
                aim = f"at least {aim}" if isinstance(aim, float) else aim
                yield Row(
                    entry.get("comparison", what), value(number, entry.get("interval")), aim, entry.get("verdict", "")
                )


def value(number: float, interval: list[float] | None) -> str:
    """Write a number with its interval."""
    return f"{number:.3g}" + (f" ({interval[0]:.3g} to {interval[1]:.3g})" if interval else "")


def verdict(met: bool) -> str:
    """Write whether an aim is met."""
    return "met" if met else "not met"


def _source(record: dict[str, Any]) -> str:
    """Write the command, the day, the machine and, where it is known, the commit of a record.

    Records of `hvd-train bench` have other keys for the machine.
    """
    machine = record.get("machine") or {
        "cores": record["hardware"]["cores"],
        "torch": record["versions"]["torch"],
    }
    commit = f", commit {record['commit']}" if "commit" in record else ""
    return f"`{record['command']}`, {record['date']}, {machine['cores']} cores, torch {machine['torch']}{commit}"


def page() -> str:
    """Return the text of docs/benchmarks.md. Records that are not there are left out."""
    parts = [HEAD]
    for section in SECTIONS:
        path = RECORDS / f"{section.record}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        parts.append(f"## {section.title}\n\n{section.text}\n\n| | | aim | |\n|---|---|---|---|")
        parts += [
            f"| {row.what} | {row.value} | {row.aim} | {row.verdict} |" for row in rows_of(section.record, record)
        ]
        if why := remark(section.record, record):
            parts.append(f"\n{why}")
        parts.append(f"\n{_source(record)}; benchmarks/records/{section.record}.json\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
