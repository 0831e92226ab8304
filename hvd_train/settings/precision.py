"""The number formats of the arithmetic and of what travels between workers."""

from dataclasses import dataclass
from typing import Literal

from hvd_train.settings.fields import at_least


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the arithmetic and of what travels between workers."""

    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Arithmetic of the forward and backward passes: fp16 (with loss scaling) and bf16 are mixed precision."""
    compression: Literal["auto", "none", "fp16"] = "auto"
    """Format of gradients on the wire: fp16 (with loss scaling), or their own; auto: fp16 on GPUs, none on CPUs."""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """Keep the channels innermost in memory, which suits convolutions on GPUs; auto: for mixed precision there."""
    compile: bool = False
    """Compile the model with torch.compile: faster steps after a start of a minute or more."""
    deterministic: bool = False
    """Use only deterministic operations on a GPU; slower. CPUs always use them."""
    max_skipped_steps: int = 10
    """Stop with an error after this many steps in a row with a loss or a gradient that is not finite (each skipped)."""

    def __post_init__(self) -> None:
        at_least("max-skipped-steps", self.max_skipped_steps, 1)
