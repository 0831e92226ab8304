"""`hvd-train bench TOOL ...`: what was typed becomes a measurement, its table and its record."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hvd_train import recipes, remote_url
from hvd_train.commands.train import parse_train
from hvd_train.config import Config
from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError, unknown_name
from hvd_train.flags import parse_flags, take, take_number
from hvd_train.help_page import Flag, Page, Section, flags_of
from hvd_train.launch import hosts, launcher, roll_call

if TYPE_CHECKING:
    from hvd_train.bench.record import Record
    from hvd_train.data.sources import OwnData
    from hvd_train.world.world import World

USAGE = """\
  bench TOOL [FLAGS]       measure: throughput, batch, allreduce, input, scaling
"""
TOOLS = ("throughput", "batch", "allreduce", "input", "scaling")


@dataclass(frozen=True)
class AllreduceOptions:
    """Measure algorithm and bus bandwidth of sums over two ranks or more, as nccl-tests defines them."""

    min_size: str = "1KB"
    """Smallest sum, in bytes, KB (1,024 bytes), MB or GB."""
    max_size: str = "256MB"
    """Largest sum; each is four times the one before."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the tensors are."""


def run(arguments: list[str]) -> int:
    """Run a tool and return 0, or 1 where a training of `scaling` has failed.

    Raises UsageError for what cannot be measured, before anything is.
    """
    tools = {
        "throughput": _throughput,
        "batch": _batch,
        "allreduce": _allreduce,
        "input": _input,
        "scaling": _scaling,
    }
    if not arguments:
        print(page([]).text(), end="")
        return 2
    if arguments[0] not in tools:
        raise unknown_name("tool of bench", arguments[0], tools)
    if launcher.elastic(os.environ):
        raise UsageError("bench measures workers that stay: start it with horovodrun -np N, without --min-np")
    json_file, rest = take(arguments[1:], "--json", "the path of a file")
    return tools[arguments[0]](rest, None if json_file is None else Path(json_file))


def page(arguments: list[str]) -> Page:
    """Return the help of the tool that comes first in the arguments, or else the list of tools.

    Raises UsageError where there is no such tool.
    """
    tool = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    pages = _pages()
    if tool:
        if tool not in pages:
            raise unknown_name("tool of bench", tool, pages)
        return pages[tool]
    tools = tuple(Flag((name,), text=page.about) for name, page in pages.items())
    about = f"Measure how fast it is. `{PROGRAM} bench TOOL --help` shows the flags of a tool."
    return Page("bench TOOL [FLAGS]", about, (Section("TOOL", tools),), (f"{PROGRAM} bench throughput digits",))


def _pages() -> dict[str, Page]:
    """Return the help of each tool."""
    json_file = Flag(("--json",), "FILE", "Also write the record of the measurement to this file.")
    horovodrun = f"horovodrun -np 2 {PROGRAM} bench"
    return {
        "throughput": Page(
            "bench throughput [RECIPE] [FLAGS]",
            "Images per second of the real step, and where its time goes; on random images, or on those of --data.",
            (Section("flags", (_number("--steps", "Steps of a repetition.", 20), _repetitions(5), _PEAK, json_file)),),
            (f"{horovodrun} throughput digits",),
            takes_settings=True,
        ),
        "batch": Page(
            "bench batch [RECIPE] [FLAGS]",
            "The largest batch of a rank that fits, the fastest one, and the smallest that is about as fast. Random "
            "images, or those of --data.",
            (Section("flags", (*_BATCH_FLAGS, _repetitions(3), _PEAK, json_file)),),
            (f"{PROGRAM} bench batch digits --plot batch.png", f"{horovodrun} batch digits --to 1024"),
            takes_settings=True,
        ),
        "allreduce": Page(
            "bench allreduce [FLAGS]",
            "Bandwidth of sums over two ranks or more, by size, in fp32, fp16 and bf16, as nccl-tests define it.",
            (Section("flags", (*flags_of(AllreduceOptions).values(), _repetitions(5), json_file)),),
            (f"{horovodrun} allreduce --max-size 64MB",),
        ),
        "input": Page(
            "bench input [RECIPE] [FLAGS]",
            "Images per second of the data pipeline alone, and the stage that limits it.",
            (Section("flags", (_number("--seconds", "Time of a repetition.", 3), _repetitions(3), json_file)),),
            (f"{PROGRAM} bench input --data folder --data-dir DATA",),
            takes_settings=True,
        ),
        "scaling": Page(
            "bench scaling --np 1,2,4 [RECIPE] [FLAGS]",
            "Train on each of several numbers of workers, and compare them in a table and plots. It starts its ranks.",
            (Section("flags", (*_SCALING_FLAGS, json_file)),),
            (f"{PROGRAM} bench scaling --np 1,2,4 digits --epochs 2",),
            takes_settings=True,
        ),
    }


_SCALING_FLAGS = (
    Flag(("--np",), "N,N,...", "The numbers of workers."),
    Flag(("--hosts",), "FILE", "Start them on the hosts of this file."),
    Flag(("--mode",), "weak|strong", "Keep the batch of a worker, or the global batch. (default: weak)"),
    Flag(("--controller",), "gloo|mpi", "How ranks find one another, and sum on CPUs. (default: gloo)"),
)


_PEAK = Flag(("--peak-tflops",), "X", "Operations a second that the device can do, in 10^12. (default: if known)")
_FIRST, _LAST = 2, 8192  # batch norm needs two values of a feature


def _number(flag: str, text: str, default: int) -> Flag:
    return Flag((flag,), "N", f"{text} (default: {default})")


_BATCH_FLAGS = (
    _number("--from", "The batch to begin with.", _FIRST),
    _number("--to", "The largest batch to look at.", _LAST),
    _number("--seconds", "Time of a repetition.", 1),
    Flag(("--plot",), "FILE", "Also draw the speed over the batch, as .png or .svg."),
)


def _repetitions(default: int) -> Flag:
    return _number("--repetitions", "How often it is measured.", default)


def _throughput(arguments: list[str], path: Path | None) -> int:
    steps, rest = take_number(arguments, "--steps", 20)
    repetitions, rest = take_number(rest, "--repetitions", 5)
    peak, rest = _take_peak(rest)
    config, images = _config_and_images(rest, "bench throughput")
    from hvd_train.bench import throughput

    return _measure(
        "throughput",
        arguments,
        path,
        config,
        lambda world: throughput.measure(
            config, world, steps=steps, repetitions=repetitions, images=images, peak_tflops=peak
        ),
        throughput.table,
    )


def _config_and_images(arguments: list[str], command: str) -> tuple[Config, OwnData | None]:
    """Return the config to measure, and what makes the random images that stand in for its own; None: nothing does."""
    config = parse_train(arguments, command)
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    roll_call.started(os.environ)
    from hvd_train.bench import throughput

    # Random images stand in for images of classes alone.
    own_data = bool(flags & {"--data", "--data-dir"}) or not config.task.is_of_image_classes
    images = None if own_data else throughput.images_like(config.data.data)
    return throughput.without_files(config, own_data=own_data), images


def _take_peak(arguments: list[str]) -> tuple[float | None, list[str]]:
    """Take --peak-tflops out of the arguments. Raises UsageError where it is no number above 0."""
    text, rest = take(arguments, "--peak-tflops", "a number")
    if text is None:
        return None, rest
    peak = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else 0.0
    if peak == 0:
        raise UsageError(f"--peak-tflops {text}: it must be a number above 0, as in --peak-tflops 312")
    return peak, rest


def _batch(arguments: list[str], path: Path | None) -> int:
    first, rest = take_number(arguments, "--from", _FIRST)
    last, rest = take_number(rest, "--to", max(_LAST, first))
    seconds, rest = take_number(rest, "--seconds", 1)
    repetitions, rest = take_number(rest, "--repetitions", 3)
    plot, rest = take(rest, "--plot", "the path of a .png or .svg file")
    peak, rest = _take_peak(rest)
    if first > last:
        raise UsageError(f"--from {first} is larger than --to {last}")
    config, images = _config_and_images(rest, "bench batch")
    from hvd_train.bench import batch, plots, record
    from hvd_train.run import check, connect
    from hvd_train.world.world import together

    def check_files() -> None:
        record.check_target(path, "batch")
        if plot is not None:
            plots.check_target(Path(plot))

    check(config)
    with contextlib.closing(connect(config)) as world:
        speaks = world.place.rank == 0
        together(world, lambda: check_files() if speaks else None)
        about = {**record.about("batch", arguments), "hosts": len(set(world.gather(socket.gethostname())))}
        found: Record | None = None
        for row, found in world.in_each_world(
            lambda: batch.measure(
                config,
                world,
                first=first,
                last=last,
                seconds=seconds,
                repetitions=repetitions,
                images=images,
                peak_tflops=peak,
            )
        ):
            if speaks:
                show(batch.in_short(row, found))
                if path is not None and found is not None:
                    record.write(path, {**about, **found})
        if speaks and found is not None:
            show(f"\n{batch.table(found)}")
            if plot is not None:
                plots.write(Path(plot), plots.speed_over_batch(found["rows"], found["unit"]))
    return 0


def _allreduce(arguments: list[str], path: Path | None) -> int:
    repetitions, rest = take_number(arguments, "--repetitions", 5)
    options = parse_flags(AllreduceOptions, rest, f"{PROGRAM} bench allreduce")
    launched = launcher.launched(os.environ)
    if launched is None or launched.size == 1:
        raise UsageError(
            "bench allreduce measures what travels between ranks, and there is one: type "
            "`horovodrun -np 2 hvd-train bench allreduce`"
        )
    roll_call.started(os.environ)
    from hvd_train.bench import allreduce

    sizes = allreduce.sizes(options.min_size, options.max_size)
    config = recipes.get(recipes.DEFAULT).replace(device=options.device)
    return _measure(
        "allreduce",
        arguments,
        path,
        config,
        lambda world: allreduce.measure(config, world, sizes, repetitions),
        allreduce.table,
    )


def _input(arguments: list[str], path: Path | None) -> int:
    seconds, rest = take_number(arguments, "--seconds", 3)
    repetitions, rest = take_number(rest, "--repetitions", 3)
    config = parse_train(rest, "bench input")
    roll_call.started(os.environ)
    from hvd_train.bench import pipeline

    return _measure(
        "input",
        arguments,
        path,
        config,
        lambda world: pipeline.measure(config, world, seconds=seconds, repetitions=repetitions),
        pipeline.table,
    )


def _measure(
    tool: str,
    arguments: list[str],
    path: Path | None,
    config: Config,
    measure: Callable[[World], Record],
    table: Callable[[Record], str],
) -> int:
    """Measure in the world that the launcher has made; rank 0 prints the table and writes the record to `path`."""
    from hvd_train.bench import record
    from hvd_train.run import check, connect
    from hvd_train.world.world import together

    check(config)
    with contextlib.closing(connect(config)) as world:
        speaks = world.place.rank == 0
        together(world, lambda: record.check_target(path, tool) if speaks else None)
        measurement = world.run(lambda: measure(world))
        num_hosts = len(set(world.gather(socket.gethostname())))
        if speaks:
            show(table(measurement))
            if path is not None:
                record.write(path, {**record.about(tool, arguments), "hosts": num_hosts, **measurement})
    return 0


def _scaling(arguments: list[str], path: Path | None) -> int:
    if launcher.launched(os.environ):
        raise UsageError("bench scaling starts its ranks itself: type it without a launcher")
    numbers, rest = take(arguments, "--np", "numbers of workers, as in --np 1,2,4")
    host_file, rest = take(rest, "--hosts", "a host file")
    mode, rest = take(rest, "--mode", "weak or strong")
    controller, rest = take(rest, "--controller", "gloo or mpi")
    config = parse_train(rest, "bench scaling")
    from hvd_train.bench import record, scaling

    if numbers is None:
        raise UsageError("bench scaling needs numbers of workers: --np 1,2,4")
    counts = scaling.parse_counts(numbers)
    mode = scaling.one_of("--mode", mode or "weak", scaling.MODES)
    controller = scaling.one_of("--controller", controller or "gloo", scaling.CONTROLLERS)
    if host_file is not None:
        scaling.check_hosts(counts, hosts.read(Path(host_file)), host_file)
    record.check_target(path, "scaling")
    if config.run.output_dir and (url := remote_url.url_of(config.run.output_dir)):
        raise UsageError(f"--output-dir {url}: the runs of bench scaling are in a folder of this machine")
    folder = config.run.output_dir or Path(f"runs/scaling-{zlib.crc32(' '.join(arguments).encode()):08x}")
    sizes = scaling.plan(scaling.ended_by_time(config), counts, mode, folder)
    from hvd_train.run import check  # imports torch

    check(config)
    about = record.about("scaling", arguments)
    measurement = scaling.run(sizes, mode, folder, about, host_file=host_file, controller=controller)
    if path is not None:
        record.write(path, measurement)
    return 1 if any(row["failed"] for row in measurement["rows"]) else 0
