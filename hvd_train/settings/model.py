"""The network of a run, its initial weights and its trained parameters."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, what it starts from, and which of its parameters are trained."""

    model: str = "digits-convnet"
    """A torchvision classification model by name, timm's as timm:NAME, digits-convnet, or your own as
    package.module:function."""
    weights: str | None = None
    """Weights to start from: torchvision's by name (DEFAULT, IMAGENET1K_V2; images are then normalised as theirs were),
    or a file: a state_dict, also as `model` or `state_dict` of a checkpoint, or .safetensors. A last layer for other
    classes is not loaded."""
    freeze: str = "none"
    """Parameters that are not trained: none, backbone (all but the last layer), or names, as in layer[12].*"""
    sync_batch_norm: bool = False
    """Batch norm over the samples of all workers, instead of each micro-batch."""
    unfreeze: tuple[str, ...] = ()
    """Train frozen parameters after this many epochs: EPOCH:NAMES, as in --unfreeze 5:layer4.* 10:*"""
    average_buffers: tuple[str, ...] = ()
    """Buffers, by names as in --freeze, of which a step keeps the mean over its micro-batches, as of batch norm's
    statistics. Other changed buffers keep their values after the first micro-batch."""
