"""What a step asks of a GPU, and how often the host waits for it: counted on the stand-in of tests/fake_gpu.

    python -m benchmarks.counts --json benchmarks/records/counts.json       about a minute on 2 cores

The stand-in has no speed, but a step calls the same operators of torch, and Horovod the same kernels and sums, as on a
GPU. Two ranks take steps of `hvd-train bench throughput`, of which the last few are counted on rank 0, by phase. On a
GPU an operator is a kernel or more: one on a list of tensors is a kernel for some tens of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import about, show
from benchmarks.speed import ENVIRONMENT, LAUNCHERS, ROOT

RESNET50 = ["digits", "--model", "resnet50", "--image-size", "32", "--batch-size", "4"]
NETWORKS = {
    "digits": ["digits", "--batch-size", "4", "--ledger", "--clip-norm", "1"],
    "resnet50": RESNET50,
    "resnet50 with --sync-batch-norm": [*RESNET50, "--sync-batch-norm"],
}
KINDS = [f"{network}, {wire}" for network in ("digits", "resnet50") for wire in ("fp16", "none")]
KINDS += ["resnet50 with --sync-batch-norm, fp16"]
WARM_UP, STEPS = 2, 2
FILE = "COUNTS"  # environment: where rank 0 writes its counts

# A letter for each thing that happens, in the order in which it is asked for. These are the stand-in's (notes.h):
OPERATOR, KERNEL, TO_DEVICE, TO_HOST, ON_DEVICE, WAIT, SUM = "okdhcws"
# These are ours: a tensor is given to Horovod, and only a stream waits for its sum; what was given together has come
# (where only a stream waits: is agreed on); a phase of the step ends.
TENSOR, FOR_STREAM, ARRIVED = "ta!"
PHASES = {"data": "D", "forward": "F", "backward": "B", "reduction": "R", "optimizer": "U", "other": "."}


@dataclass(frozen=True)
class Counts:
    """What happened in one step."""

    operators: dict[str, int]
    """Operators of torch, by phase."""
    after_last_sum: int
    """Operators between the arrival of the last sum and the host's next read: the device has nothing else to do."""
    waits: int
    """How often the host waited until the device had finished something; sums of Horovod are not among it."""
    arrivals: int
    """How often the host waited for sums of Horovod."""
    agreements: int
    """How often the host waited until the ranks had agreed on a sum that only the device waits for."""
    to_device: int
    """Copies from the host to the device."""
    tensors: int
    """Tensors on which the ranks had to agree before they were summed."""
    sums: int
    """Operations of NCCL."""
    copies: int
    """Kernels and copies of Horovod's own: into the memory from which sums are sent, and back."""


def counts_of(notes: str) -> Counts:
    """Return the counts of one step from its notes."""
    phases = dict[str, str]()
    begin = 0
    for end, letter in enumerate(notes):
        for phase, mark in PHASES.items():
            if letter == mark:
                phases[phase] = phases.get(phase, "") + notes[begin:end]
                begin = end + 1
    after_last_sum = notes.rpartition(ARRIVED)[2].partition(TO_HOST)[0]
    number = Counter(notes)
    return Counts(
        operators={phase: phases.get(phase, "").count(OPERATOR) for phase in PHASES},
        after_last_sum=after_last_sum.count(OPERATOR),
        waits=number[WAIT],
        arrivals=number[ARRIVED] - number[FOR_STREAM],
        agreements=number[FOR_STREAM],
        to_device=number[TO_DEVICE],
        tensors=number[TENSOR],
        sums=number[SUM],
        copies=number[KERNEL] + number[ON_DEVICE],
    )


class Notes:
    """The notes of the stand-in, which this process runs on, with those of Horovod's calls and of a step's phases."""

    def __init__(self) -> None:
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        self._library = ctypes.CDLL(None)  # it has been preloaded
        self._library.fake_gpu_note.argtypes = [ctypes.c_char]
        self._library.fake_gpu_notes.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.fake_gpu_notes.restype = ctypes.c_size_t
        self._around(hvd, "allreduce_async_", before=lambda tensor: TENSOR)
        self._around(hvd, "grouped_allreduce_async_", before=lambda tensors: TENSOR * len(tensors))
        self._around(mpi_ops.mpi_lib, "horovod_torch_sum_for_stream", before=lambda tensor: TENSOR + FOR_STREAM)
        self._around(mpi_ops.mpi_lib, "horovod_torch_wait_and_clear", after=ARRIVED)
        self._library.fake_gpu_take_notes()

    def phase_ends(self, phase: str | None) -> None:
        """Note the end of a phase of a step, as `Split.listener` is told of it."""
        self._write(PHASES[phase] if phase is not None else "")

    def take(self) -> str:
        """Return what was noted since this was last called."""
        notes = ctypes.create_string_buffer(1 << 20)
        size = self._library.fake_gpu_notes(notes, len(notes))
        assert size < len(notes)
        return notes.raw[:size].decode()

    def _write(self, letters: str) -> None:
        for letter in letters:
            self._library.fake_gpu_note(letter.encode())

    def _around(self, owner: Any, name: str, before: Callable[[Any], str] = lambda _: "", after: str = "") -> None:
        function = getattr(owner, name)

        def noted(first: Any, *arguments: Any, **named: Any) -> Any:
            self._write(before(first))
            try:
                return function(first, *arguments, **named)
            finally:
                self._write(after)

        setattr(owner, name, noted)


def count_on_this_rank() -> None:
    """Train each kind of network for some steps with the other ranks; rank 0 writes the counts of the last ones."""
    from hvd_train.bench import throughput
    from hvd_train.commands.train import parse_train
    from hvd_train.launch import roll_call
    from hvd_train.run import connect

    configs = {
        kind: throughput.without_files(
            parse_train([*NETWORKS[network], "--device", "cuda", "--compression", wire], "bench throughput"),
            own_data=False,
        )
        for kind in KINDS
        for network, _, wire in [kind.partition(", ")]
    }
    roll_call.started(os.environ)
    counts: dict[str, list[dict[str, Any]]] = {}
    with contextlib.closing(connect(configs[KINDS[0]])) as world:
        notes = Notes()
        for kind, config in configs.items():
            training = throughput.Training(config, world)
            training._split.listener = notes.phase_ends
            # Batch norm over few small images has large gradients. A step that is skipped would ask for other things.
            training.state.scaler.update(2.0**-4)
            training.take(WARM_UP)
            notes.take()
            counts[kind] = []
            for _ in range(STEPS):
                training.take(1)
                counts[kind].append(vars(counts_of(notes.take())))
            training.close()
        if world.place.rank == 0:
            Path(os.environ[FILE]).write_text(json.dumps(counts))


def counted(variables: Mapping[str, str], folder: Path) -> dict[str, list[Counts]]:
    """Return what the steps of each of KINDS asked for, in a job that has these variables of the stand-in."""
    file = folder / "counts.json"
    command = [*LAUNCHERS["gloo"], sys.executable, "-m", "benchmarks.counts", "--on-this-rank"]
    environment = {**ENVIRONMENT, **variables, FILE: str(file)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return {kind: [Counts(**step) for step in steps] for kind, steps in json.loads(file.read_text()).items()}


def main() -> None:
    """Count, print and, if asked to, write the record."""
    if "--on-this-rank" in sys.argv:
        count_on_this_rank()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    sys.path.append(str(ROOT / "packaging"))  # the stand-in is built with the headers that Horovod was built with
    from tests.fake_gpu import build, launch

    with tempfile.TemporaryDirectory(prefix="counts-") as folder:
        variables = launch.environment(build.built(), report=Path(folder) / "told.txt", caching=True)
        steps = counted(variables, Path(folder))
    record = {
        **about("benchmarks.counts", sys.argv[1:]),
        "steps": {kind: [vars(step) for step in counts] for kind, counts in steps.items()},
    }
    show(record, options.json)


if __name__ == "__main__":
    main()
