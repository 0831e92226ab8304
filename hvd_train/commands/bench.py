"""`hvd-train bench TOOL`: measure, print the table and write the record."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from pathlib import Path

from hvd_train.commands.train import check_local, parse_train
from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError, unknown_name, whole_number
from hvd_train.flags import take
from hvd_train.launch import hosts as host_files
from hvd_train.launch import launcher, roll_call
from hvd_train.run_files import run_folder

TOOLS = """usage: hvd-train bench TOOL ...

  throughput [RECIPE] [flags of train] [--steps N] [--repetitions R]
                           images/s of the real step, and where its time goes: on random images, or on --data
  scaling --np 1,2,4 [--hosts FILE] [RECIPE] [flags of train] [--mode weak|strong] [--controller gloo|mpi]
                           a training on each number of workers, and a table of them, with charts

All take --json FILE. On several ranks: horovodrun -np 2 hvd-train bench throughput. scaling starts its ranks itself.
"""


def bench(arguments: list[str]) -> int:
    """Run a tool; return 0, or 1 if a training of `scaling` failed. Raises UsageError before anything is measured."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(TOOLS, end="")
        return 0 if arguments else 2
    tool = arguments[0]
    if tool not in (tools := ["scaling", "throughput"]):
        raise unknown_name("tool of bench", tool, tools)
    if tool == "scaling":
        launcher.refuse_others(os.environ, [PROGRAM, "bench", *arguments], alone=True)
    if {"-h", "--help"} & set(arguments):
        print(TOOLS)  # the flags of a training follow
    options, rest = take(arguments[1:], json=None)
    path = Path(options.json) if options.json else None
    return (_scaling if tool == "scaling" else _throughput)(rest, path)


def _throughput(arguments: list[str], path: Path | None) -> int:
    options, rest = take(arguments, steps=20, repetitions=5)
    config = parse_train(rest, "bench throughput")
    flags = {argument.partition("=")[0].replace("_", "-") for argument in rest}
    roll_call.started(os.environ)
    import torch

    from hvd_train.bench import record, throughput
    from hvd_train.network.device import gpu_name
    from hvd_train.run import check, connect
    from hvd_train.world.world import together

    config = throughput.without_files(config, own_data=bool(flags & {"--data", "--data-dir"}))
    check(config)
    with contextlib.closing(connect(config)) as world:
        first = world.place.rank == 0
        together(world, lambda: record.check_target(path) if first else None)
        world.meet()
        measurement = throughput.measure(config, world, **vars(options))
        names = world.gather(socket.gethostname())
        if first:
            show(throughput.table(measurement))
        if first and path is not None:
            about = run_folder.environment(names, gpu_name(torch.device(measurement["device"])))
            record.write(path, {"bench": "throughput", "environment": about, **measurement})
    return 0


def _scaling(arguments: list[str], path: Path | None) -> int:
    options, rest = take(arguments, np="", hosts=None, mode="weak", controller="gloo")
    config = parse_train(rest, "bench scaling")
    check_local(config, "bench scaling")
    from hvd_train.bench import record, scaling

    counts = sorted({whole_number(part) or 0 for part in options.np.split(",")})
    if counts[0] < 1:
        raise UsageError(f"--np {options.np!r}: write numbers of workers from 1 on, as in --np 1,2,4")
    mode = options.mode
    controller = options.controller
    if mode not in ("weak", "strong") or controller not in ("gloo", "mpi"):
        raise UsageError(f"--mode {mode} --controller {controller}: they must be weak or strong, and gloo or mpi")
    hosts = host_files.named(options.hosts) if options.hosts else ()
    record.check_target(path)
    folder = config.run.output_dir or Path(f"runs/scaling-{zlib.crc32(' '.join(arguments).encode()):08x}")
    sizes = scaling.plan(config, counts, mode, folder)
    from hvd_train.run import check  # imports torch

    check(config)
    about = {"bench": "scaling", "environment": run_folder.environment([socket.gethostname()], None), "mode": mode}
    measurement = scaling.run(folder, sizes, about, hosts=hosts, controller=controller)
    if path is not None:
        record.write(path, measurement)
    return 1 if any(row["failed"] for row in measurement["rows"]) else 0
