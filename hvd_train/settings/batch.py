"""The samples of a step, and how the workers share them."""

from dataclasses import dataclass
from typing import Literal

from hvd_train.errors import UsageError
from hvd_train.settings.fields import at_least


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The samples of a step, and how the workers share them."""

    batch_size: int | None = None
    """Samples per worker in one forward pass (and the group that batch norm normalises over); default: 16 to 48."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all workers; default: batch size x accumulation steps x workers at the start."""
    accumulation_steps: int = 1
    """Forward passes per worker and optimizer step; a global batch size and the number of workers decide it."""
    eval_batch_size: int = 256
    """Samples per worker in one forward pass of an evaluation."""
    on_resize: Literal["global", "per-worker"] = "global"
    """When workers come or go: keep the global batch, or the batch per worker (the learning rate follows)."""

    def __post_init__(self) -> None:
        at_least("batch-size", self.batch_size, 1)
        at_least("global-batch-size", self.global_batch_size, 1)
        at_least("accumulation-steps", self.accumulation_steps, 1)
        at_least("eval-batch-size", self.eval_batch_size, 1)
        if self.batch_size is None and self.global_batch_size is None:
            raise UsageError("no batch size: give --batch-size (per worker) or --global-batch-size")
        if self.batch_size and self.global_batch_size and self.accumulation_steps > 1:
            at_once = self.batch_size * self.accumulation_steps
            if self.global_batch_size % at_once:
                raise UsageError(
                    f"--global-batch-size {self.global_batch_size} is not a multiple of --batch-size {self.batch_size} "
                    f"x --accumulation-steps {self.accumulation_steps} = {at_once}; leave out --accumulation-steps"
                )
        if self.on_resize == "per-worker" and self.global_batch_size is not None:
            raise UsageError("--on-resize per-worker needs --batch-size (per worker), without --global-batch-size")
