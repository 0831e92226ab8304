"""Processes that die in the middle of an update of shared weights: by torch, in a training, or in our own C."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
from pathlib import Path

import torch
from torch import nn

from hvd_train.network.small import digits_convnet
from hvd_train.world import shard_update, shared_weights, sharing, step_in_c

AT = "HVD_TRAIN_TEST_TORN_AT"
"""The variable with the numbers of updates, counted in each process: at each one process dies, whichever is first."""
SPARED = "HVD_TRAIN_TEST_TORN_SPARED"
"""The variable with the rank, if any, that does not die."""
LIBRARY = "HVD_TRAIN_TEST_TORN_LIBRARY"
"""The variable with the file that `compiled` has made, if updates are to be made in C and not by torch."""
MOMENTS = ("while a block is kept", "when a block is kept", "in the middle of a block", "when a block is updated")
"""When a process can die in the second block that it updates in C."""

_KEPT, _UPDATED = "write_word(word, step | number << 1 | 1);", "write_word(word, step | (number + 1) << 1);"
_DEATH = """
#include <signal.h>
#include <stdint.h>
int moment; /* the number of the moment, from 1; 0 is never */
#define DIE_AT(MOMENT, SPOIL) if (moment == MOMENT && number == 1) { SPOIL; raise(SIGKILL); }
"""


def compiled(folder: Path, block: int) -> Path:
    """Return `shard_step.c` compiled with blocks of so many numbers and with MOMENTS, of which `moment` chooses one."""
    source = Path(step_in_c.__file__).with_name("shard_step.c").read_text()
    nonsense = "weights[at] = weights[at + count / 2] = 1e9f; if (moving) moving[count / 3] = 1e9f"
    for old, new in (
        ("BLOCK = 512", f"BLOCK = {block}"),
        (_KEPT, f"DIE_AT(1, log[0] = 1e9f) {_KEPT} DIE_AT(2, )"),
        (_UPDATED, f"DIE_AT(3, {nonsense}) DIE_AT(4, ) {_UPDATED}"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "torn.c").write_text(_DEATH + source)
    command = ["gcc", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "torn.c", "-o", "torn.so"]
    subprocess.run(command, check=True, timeout=60, cwd=folder)
    return folder / "torn.so"


class _TornChunk(shard_update.ChunkUpdate):
    """A chunk in which a process ends when half of the numbers are nonsense."""

    def update(self, factor: float | None) -> None:
        dies = _is_to_die()
        super().update(factor)
        if dies:
            with torch.no_grad():
                for numbers in self._changing:
                    numbers[: len(numbers) // 2 + 1] = 1e9
            os.kill(os.getpid(), signal.SIGKILL)


class _TornDescent(shard_update.DescentInC):
    """An update in C in which a process ends in the middle of a block."""

    def take(self, step: int, factor: float | None) -> None:
        if _is_to_die():
            moment = ctypes.c_int.in_dll(step_in_c._loaded(), "moment")
            moment.value = 1 + MOMENTS.index("in the middle of a block")
        super().take(step, factor)


_updates = itertools.count(1)


def _is_to_die() -> bool:
    """Count an update of this process, and return whether it is to end in it."""
    number = str(next(_updates))
    return number in os.environ.get(AT, "").split(",") and _is_first(f"torn-{number}")


def _is_first(name: str) -> bool:
    if os.environ.get(SPARED, "") == os.environ.get("HOROVOD_RANK"):
        return False
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def model(num_classes: int) -> nn.Module:
    """Return the digits recipe's network, whose updates of shared weights are torn."""
    file = os.environ.get(LIBRARY)
    if file:
        library = step_in_c.load(Path(file))
        step_in_c._library = lambda: library  # type: ignore[assignment]
        shared_weights.DescentInC = _TornDescent  # type: ignore[misc, attr-defined]
    else:
        sharing.rounding_of = lambda *_: None  # type: ignore[attr-defined]
        shared_weights.ChunkUpdate = _TornChunk  # type: ignore[misc, attr-defined]
    return digits_convnet(num_classes)
