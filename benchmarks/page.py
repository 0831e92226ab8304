"""Write docs/benchmarks.md and the README's figures of speed from the records: `python -m benchmarks.page`.

It is the last step of `make bench`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS
from benchmarks.speed import STARTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
README = PAGE.parents[1] / "README.md"
CLAIMS = re.compile(r"(?<=<!-- speed, by benchmarks/page\.py -->\n).*?(?=<!-- end of speed -->)", re.DOTALL)
NETWORKS = {
    "convnet": "the digits recipe's network, 8 pixels",
    "resnet18": "ResNet-18, 32 pixels",
    "resnet50": "ResNet-50, 64 pixels",
    "mobilenet": "MobileNetV3-large, 64 pixels",
    "vgg11": "VGG-11, 32 pixels",
}
HEAD = """# Benchmarks

`make bench` writes this page from the records in `benchmarks/records/` (`benchmarks/page.py`): do not edit it.
`make bench-quick` shows the ratios in less than five minutes. Programs that are compared take turns of a few steps on
the same machine (`benchmarks/turns.py`). A value is the median over the turns, or over several starts of both, with its
95% bootstrap interval in brackets. *met* and *not met* mean that the whole interval is on one side of the aim.

Nothing on this page ran on a GPU or on several machines.
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
        "Images per second of our loop on two ranks, divided by those of the loop that an expert writes with Horovod "
        "or with torch's DistributedDataParallel (`benchmarks/bare.py`): the same network, images, arithmetic and "
        "threads, a fused update, and memory that glibc keeps for the next step (mallopt's M_MMAP_MAX and "
        "M_TRIM_THRESHOLD). DistributedDataParallel has `gradient_as_bucket_view`, `static_graph` and no "
        "`broadcast_buffers`, and the best `bucket_cap_mb` of 4, 25 and 100; Horovod has the best of no `groups` and "
        "groups of about 4 and 25 MB. Both sizes are found anew before each record. The limit is *none*: two ranks "
        "with these settings that exchange nothing; the time of a step of ours, divided by that of one of theirs, "
        "says how much is left to gain. Networks train on images of 8 pixels (convnet, the digits recipe's own), 32 "
        "(ResNet-18 and VGG-11) and 64 (ResNet-50 and MobileNetV3-large), with 30, 30, 8, 16 and 16 on each rank. All "
        "programs of a series take turns.",
    ),
    Section(
        "Beside programs as most write them",
        "speed-plain",
        "The same beside loops without these settings, and one in the style of Horovod's published examples. What an "
        "expert would gain is in these figures, too.",
    ),
    Section(
        "A step's own cost",
        "own-cost",
        "How many microseconds a step of ours takes longer than one of the bare Horovod loop: the digits recipe's "
        "network, one rank, both in the same process in turns of an epoch.",
    ),
    Section(
        "Memory of a rank",
        "memory",
        "MB (of 2^20 bytes) of a rank of one host between two steps, what ranks share divided among them (Pss): SGD "
        "with momentum, networks and batches as above. Shared, weights and momentum are there once for all ranks; the "
        "gradients of each rank are not, and a gradient of a layer is there twice while it is copied to where the "
        "others read it: with few ranks that is as much again, above all for a layer of 392 MB as VGG-11 has. The "
        "record is older than the sums that take the place of another rank's gradients: now a host needs one copy "
        "of the gradients less.",
    ),
    Section(
        "What a step asks of a GPU",
        "counts",
        "Counted on a stand-in for CUDA and NCCL ([what it can show](../tests/fake_gpu/README.md)), which has no "
        "speed: the real step on two ranks, with gradients that travel as fp16 or as they are (none). *Operators* are "
        "those of torch; on a GPU each is a kernel or more. After the last sum nothing else keeps a device busy. With "
        "`--sync-batch-norm` the device alone waits for a sum of batch norm, and the host until the ranks agree on it.",
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
        "Compiled by block",
        "compiled",
        "What `--compile` changes by compiling a network block by block, beside the same network as it is and as one "
        "program: two ranks, images of 64 pixels, 16 on each, over Gloo, on CPUs. ResNet-50 is compiled without "
        "generating code, which changes nothing in which gradients leave first. Each way starts without what was "
        "compiled before, and later ones have imported the compiler already.",
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
        "How ranks meet",
        "meeting",
        "Ranks on this machine, two at a time on its cores: the seconds of `hvd.init()`, the requests to the "
        "launcher's store, and the time of a sum of 16 numbers. And as many clients as a large job has ranks, all in "
        "one process, which learn one another's addresses and do not connect.",
    ),
    Section(
        "What ranks say to one another in a step",
        "rounds",
        "As many tensors as ResNet-50 has, of 16 numbers each, one by one as Horovod's own optimizer hands them over, "
        "as one group as ours does, and one tensor alone: the rounds in which rank 0 hears from all what to sum, the "
        "time of the step through shared memory (ranks of this machine, two at a time on its cores), and without it, "
        "as between hosts, the writes of rank 0 and of another rank.",
    ),
    Section(
        "Order of samples",
        "order",
        "A simulated epoch of 10^9 samples on 1,024 ranks: the time of a sample, the time to resume at any cursor, and "
        "the memory.",
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
        phases = [Row(phase, f"{seconds * 1000:.1f} ms") for phase, seconds in record["split"].items() if seconds]
        return [Row("images a second", speed), *phases]
    if name.startswith("speed"):
        return list(_speeds(record))
    if name == "counts":
        return list(_counts(record))
    if name == "memory":
        return [Row(what, f"{megabytes:,} MB") for what, megabytes in record["megabytes of a rank"].items()]
    if name == "input":
        return list(_inputs(record))
    if name == "meeting":
        return list(_meetings(record))
    if name == "rounds":
        return list(_rounds(record))
    if name == "wire":
        return list(_measured({"fp16 over fp32": record}))
    return list(_measured(record))


def remark(name: str, record: dict[str, Any]) -> str:
    """Return why an aim is not met, with the numbers that show it, or where the time goes."""
    missed = any(row.verdict == "not met" for row in rows_of(name, record))
    if name == "input":
        spent = record["quality 90"]["microseconds_per_image"]
        entropy = spent["usual: of decoding, the entropy code (decoded at 1/8)"]
        return (
            f"Where the time goes, in microseconds of an image of {record['quality 90']['bytes_per_file'] / 1000:.0f} "
            f"KB: {spent['ours: decode the part and resize']} to decode and resize the part that training sees, "
            f"{spent['ours: decode what evaluation shows and resize']} for what evaluation sees; the usual way takes "
            f"{spent['usual: open and decode']} to decode, {entropy} of them for the entropy code, and "
            f"{spent['usual: crop and resize']} to resize."
        )
    if name == "counts" and missed:
        return (
            "Why not 8: one operator reads the sums, seven unscale the gradients (two of them are copies of numbers "
            "that torch's GradScaler makes for other devices), one takes their norms, and one puts these beside what "
            "travelled, so that the host waits once and not three times."
        )
    if name == "own-cost":
        parts = ", ".join(f"{part} {number}" for part, number in record["microseconds_of_parts"].items())
        return (
            f"Where the time goes, in microseconds of a step: {parts}. The bare loop also has to take a batch, and "
            "needs longer for its update, which is not fused."
        )
    if name == "speed" and missed:
        split = json.loads((RECORDS / "throughput-gloo.json").read_text())["split"]
        return (
            "Why not more: beside its passes and its update a step of ours counts losses and hits, takes the norm of "
            "the gradient and writes down what it did (below), and on two busy cores what one rank loses the other "
            f"waits for: {split['reduction'] * 1000:.1f} ms of each step of the ResNet-18 (below) are a wait for sums "
            "that the backward pass did not hide. The sums themselves take the cores from the passes. Where the "
            "commit is 4d085e5 or older, sums and updates of shared weights were not yet taken in C."
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


def _speeds(record: dict[str, Any]) -> Iterator[Row]:
    """Yield a line for each peer of each series; the intervals of a first look are too rough for a verdict."""
    for series in record["series"]:
        for peer, ratio in series["beside"].items():
            size = ratio.get("bucket_mb")
            pieces = "" if size is None else f", pieces of {size} MB" if size else ", each gradient alone"
            yield Row(
                f"{series['network']}: {ratio['of']} of ours ({series['launcher']}) over {peer}{pieces}",
                value(ratio["median"], ratio["interval"]),
                ratio.get("aim", ""),
                "" if _first_look(record) else ratio.get("verdict", ""),
            )


def _first_look(record: dict[str, Any]) -> str:
    """Return a sentence that warns of a record with few starts, of which an interval says little."""
    starts = min(len(ratio["ratios_of_starts"]) for series in record["series"] for ratio in series["beside"].values())
    return f" A first look with {starts} start{'s' * (starts > 1)}, to be measured again." if starts < STARTS else ""


def _warnings(record: dict[str, Any]) -> str:
    """Return sentences that say how far a record of speed can be trusted."""
    return _first_look(record) + (f" Measured {record['note']}." if "note" in record else "")


def claims(record: dict[str, Any]) -> str:
    """Return what the README says of speed: beside programs of experts, with the distance to the limit."""
    peers = ["horovod-expert (gloo)", "ddp-expert (torchrun)", "none"]
    titles = [
        "images/s over Horovod's loop",
        "images/s over DistributedDataParallel's",
        "time of a step over the limit",
    ]
    lines = [f"| | {' | '.join(titles)} |", "|---|---|---|---|"]
    for series in record["series"]:
        if set(peers) <= set(series["beside"]):
            ratios = [series["beside"][peer] for peer in peers]
            values = [value(ratio["median"], ratio["interval"]) for ratio in ratios]
            lines.append(f"| {NETWORKS[series['network']]} | {' | '.join(values)} |")
    source = f"(`{record['command']}`, {record['date']}; `benchmarks/records/speed.json`.{_warnings(record)})"
    return "\n".join([*lines, "", source, ""])


def readme() -> str:
    """Return the text of README.md, with the record's figures of speed."""
    record = json.loads((RECORDS / "speed.json").read_text())
    return CLAIMS.sub(lambda _: claims(record), README.read_text(encoding="utf-8"))


def _counts(record: dict[str, Any]) -> Iterator[Row]:
    for kind, (step, *_) in record["steps"].items():
        after, waits = step["after_last_sum"], step["waits"]
        operators = ", ".join(f"{phase} {number}" for phase, number in step["operators"].items() if number)
        yield Row(f"{kind}: operators", operators)
        yield Row(
            f"{kind}: operators after the last sum, until the host reads", f"{after}", "at most 8", verdict(after <= 8)
        )
        yield Row(f"{kind}: waits of the host for the device", f"{waits}", "at most 1", verdict(waits <= 1))
        yield Row(f"{kind}: waits of the host for sums", f"{step['arrivals']}")
        if step["agreements"]:
            yield Row(f"{kind}: waits of the host for ranks to agree on a sum", f"{step['agreements']}")
        yield Row(f"{kind}: tensors that ranks agree on", f"{step['tensors']}")
        yield Row(f"{kind}: operations of NCCL, copies of Horovod's", f"{step['sums']}, {step['copies']}")


def _meetings(record: dict[str, Any]) -> Iterator[Row]:
    for who, found in record.items():
        if isinstance(found, dict) and "requests" in found:
            shown = f"{found['seconds']} s, {found['requests']:,} requests"
            if sum_ms := found.get("milliseconds of a small sum"):
                shown += f", a sum {sum_ms} ms"
            yield Row(who, shown, found.get("aim", ""), found.get("verdict", ""))


def _rounds(record: dict[str, Any]) -> Iterator[Row]:
    for who, ways in record.items():
        if who.endswith(" ranks"):
            for way, found in ways.items():
                rounds = f"{found['rounds']} round{'s' if found['rounds'] != 1 else ''}"
                writes = f"{found['writes of rank 0']} and {found['writes of another rank']} writes"
                yield Row(f"{who}: {way}", f"{rounds}, {found['milliseconds']} ms, {writes}")


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
        warning = f".{_warnings(record)}" if "series" in record else ""
        parts.append(f"\n{_source(record)}; benchmarks/records/{section.record}.json{warning}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
