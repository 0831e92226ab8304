"""`hvd-train bench TOOL`: measure, print the table and write the record."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from argparse import Namespace
from pathlib import Path

from hvd_train.commands import tree
from hvd_train.commands.train import check_local, settings_of
from hvd_train.console import show
from hvd_train.errors import UsageError, whole_number
from hvd_train.launch import hosts as host_files
from hvd_train.launch import roll_call
from hvd_train.run_files.environment import environment


def throughput(options: Namespace) -> int:
    """Time the step of a training and return 0. Raises UsageError before anything is measured."""
    config = settings_of(options)
    own_data = "data" in options or "data_dir" in options or len(options.words) > 1
    roll_call.started(os.environ)
    import torch

    from hvd_train.bench import record, throughput
    from hvd_train.network.device import gpu_name
    from hvd_train.run import check, connect
    from hvd_train.world.world import together

    config = throughput.without_files(config, own_data=own_data)
    check(config)
    with contextlib.closing(connect(config)) as world:
        first = world.place.rank == 0
        together(world, lambda: record.check_target(options.json) if first else None)
        world.meet()
        measurement = throughput.measure(
            config, world, steps=options.steps, repetitions=options.repetitions
        )
        names = world.gather(socket.gethostname())
        if first:
            show(throughput.table(measurement))
        if first and options.json is not None:
            about = environment(names, gpu_name(torch.device(measurement["device"])))
            record.write(options.json, {"bench": "throughput", "environment": about, **measurement})
    return 0


def scaling(options: Namespace) -> int:
    """Train on each number of workers; return 1 if a training failed, else 0.

    Raises UsageError before the first one starts.
    """
    config = settings_of(options)
    check_local(config, options)
    from hvd_train.bench import record, scaling

    counts = sorted({whole_number(part) or 0 for part in options.np.split(",")})
    if counts[0] < 1:
        raise UsageError(
            f"--np {options.np!r}: write numbers of workers from 1 on, as in --np 1,2,4"
        )
    hosts = host_files.named(options.hosts or None)
    record.check_target(options.json)
    line = " ".join(tree.without(options.typed, ["--json"]))
    folder = config.run.output_dir or Path(f"runs/scaling-{zlib.crc32(line.encode()):08x}")
    sizes = scaling.plan(config, counts, options.mode, folder)
    from hvd_train.run import check  # imports torch

    check(config)
    about = {
        "bench": "scaling",
        "environment": environment([socket.gethostname()], None),
        "mode": options.mode,
    }
    measurement = scaling.run(folder, sizes, about, hosts=hosts, controller=options.controller)
    if options.json is not None:
        record.write(options.json, measurement)
    return 1 if any(row["failed"] for row in measurement["rows"]) else 0
