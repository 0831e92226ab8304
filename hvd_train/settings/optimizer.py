"""How a gradient changes the weights, and how the gradients of the workers become one."""

from dataclasses import dataclass
from typing import Literal

from hvd_train.errors import UsageError
from hvd_train.settings.fields import at_least, positive, within


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient changes the weights."""

    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "sgd"
    """Optimizer; lars and lamb, for large batches, are timm's (pip install timm)."""
    learning_rate: float = 0.1
    """Peak learning rate, for a global batch of `lr-base-batch` if it is scaled."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the global batch: not at all, in proportion, or with its square root."""
    lr_base_batch: int = 256
    """The global batch for which `learning-rate` was chosen (with --lr-scaling linear or sqrt)."""
    momentum: float = 0.9
    """Momentum of SGD and LARS."""
    nesterov: bool = False
    """Use Nesterov momentum, with sgd or lars."""
    weight_decay: float = 5e-4
    """Strength of the weight decay."""
    decay_of: Literal["all", "weights"] = "all"
    """What weight decay applies to: all parameters, or all but biases and normalisation layers."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes, from 0 to below 1."""
    reduction: Literal["average", "adasum"] = "average"
    """How the workers' gradients are combined: averaged, or by Adasum, which adds what they do not have in common (with
    MPI, on 1, 2, 4, 8, ... workers)."""
    gradient_predivide_factor: float = 1.0
    """Divide gradients by this before they are added over the workers, and multiply their sum by it."""
    fusion_groups: int | None = None
    """Number of groups in which gradients are sent; default: groups of about 25 MB."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient; a larger gradient is scaled down to it."""
    ema_decay: float | None = None
    """Keep a moving average of the weights: after each step, `ema-decay` (say 0.999) of the old average plus the rest
    of the new weights. Evaluation and the best and final weights use the average."""

    def __post_init__(self) -> None:
        positive("learning-rate", self.learning_rate)
        at_least("lr-base-batch", self.lr_base_batch, 1)
        at_least("weight-decay", self.weight_decay, 0)
        within("momentum", self.momentum, 0, 1)
        within("label-smoothing", self.label_smoothing, 0, 1)
        positive("clip-norm", self.clip_norm)
        positive("gradient-predivide-factor", self.gradient_predivide_factor)
        at_least("fusion-groups", self.fusion_groups, 1)
        if self.reduction == "adasum" and self.clip_norm is not None:
            raise UsageError(
                "--clip-norm does not go with --reduction adasum, whose result has another length for the same "
                "gradients of the workers; leave one of them out"
            )
        if self.reduction == "adasum" and self.gradient_predivide_factor != 1:
            raise UsageError("--gradient-predivide-factor does not go with --reduction adasum, which adds no gradients")
        within("ema-decay", self.ema_decay or 0.0, 0, 1)
        if self.nesterov and (self.optimizer not in ("sgd", "lars") or self.momentum == 0):
            raise UsageError("--nesterov needs --optimizer sgd or lars with a momentum above 0, else --no-nesterov")
