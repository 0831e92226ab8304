r"""The share of a training's time that goes into computing slots again (`--recheck-steps auto`).

    horovodrun --gloo -np 2 python -m benchmarks.rechecks digits --epochs 400
    horovodrun --gloo -np 2 python -m benchmarks.rechecks digits --data synthetic --model resnet18 \
        --image-size 64 --batch-size 16 --recheck-steps 4 --max-steps 20

Trains as `hvd-train train` does with these arguments, and prints how often and how long each rank has compared
gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hvd_train import recipes
from hvd_train.config import Config
from hvd_train.flags import parse_flags
from hvd_train.recheck import Rechecks
from hvd_train.run import train
from hvd_train.step import Step


def main(arguments: Sequence[str]) -> None:
    """Train, and print the share."""
    recipe, *flags = arguments
    seconds: list[float] = []
    compare = Rechecks.contradiction

    def timed(self: Rechecks, step: Step, num_slots: int) -> str | None:
        begun = time.perf_counter()
        try:
            return compare(self, step, num_slots)
        finally:
            seconds.append(time.perf_counter() - begun)

    Rechecks.contradiction = timed  # type: ignore[method-assign]
    config = parse_flags(Config, flags, "rechecks", recipes.RECIPES[recipe]())
    begun = time.perf_counter()
    train(config)
    whole = time.perf_counter() - begun
    mean = sum(seconds) / max(1, len(seconds))
    print(f"{len(seconds)} rechecks of {1000 * mean:.1f} ms: {sum(seconds) / whole:.3%} of {whole:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
