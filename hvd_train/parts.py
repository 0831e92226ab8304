"""What a rank builds from the config: device, data, loaders, model, and with a world the first state."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train import goals
from hvd_train.by_task import Mixer, Passes, unmixed
from hvd_train.config import Config
from hvd_train.data import gpu_decoder, sources
from hvd_train.data.batches import Loader
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Arrays, DataSet
from hvd_train.data.encoded import EncodedImages
from hvd_train.data.loader import open_loader
from hvd_train.data.loader_process import collated
from hvd_train.data.prepare import AsTheyAre, Preparation, Prepare
from hvd_train.data.sources import OwnData
from hvd_train.data.trees import Tree, mapped
from hvd_train.errors import UsageError
from hvd_train.handover import Handover
from hvd_train.launch import launcher
from hvd_train.network import buffers, freeze, models, normalization, optim, safetensors_file, weights
from hvd_train.network.compiled import any_size, blocks_of, compile_blocks, slot_sizes
from hvd_train.network.device import (
    autocast,
    choose_device,
    gpus_may_be_shared,
    loss_scaler,
    num_cores,
    return_freed_memory,
    uses_channels_last,
    wire_dtype,
)
from hvd_train.network.memory import enough_for, enough_for_passes
from hvd_train.network.models import Builder
from hvd_train.network.several import Several
from hvd_train.network.trial_passes import Trial, check_deterministic, pass_through
from hvd_train.progress import order
from hvd_train.progress.clock import Split
from hvd_train.run_files import destinations
from hvd_train.settings.data import DataConfig
from hvd_train.state import TrainState
from hvd_train.step import Steps
from hvd_train.tasks import built_in
from hvd_train.tasks.built_in import OwnTask
from hvd_train.tasks.fitting import fit
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Task
from hvd_train.world.world import Place, Reduction, World

_LOADER_PROCESSES = 4  # what keeps a GPU busy, as a rule


@dataclass(frozen=True)
class Own:
    """What the user brings as Python objects, in place of what the config names; None: nothing."""

    model: Builder | None = None
    data: OwnData | None = None
    task: OwnTask | None = None


NOTHING = Own()


@dataclass(frozen=True)
class Parts:
    """What is built on each rank from the config and its place alone, before anything is exchanged."""

    device: torch.device
    data: DataSet
    model: nn.Module
    train_loader: Loader
    val_loader: Loader | None
    test_loader: Loader | None
    meter: Meter
    """Measures the task."""
    example: tuple[Tree, Tree]
    """The inputs and targets of two samples, as the model and the task take them."""
    unit: str = "images"
    """What people call several samples."""
    notes: tuple[str, ...] = ()
    """What the user should know about how a fresh training starts."""
    updated_alone: bool = True
    """Whether nothing but the optimizer's updates changes weights; a program's own loop may do what it likes."""


def warm_parts(config: Config, world: World, own: Own = NOTHING) -> tuple[Parts, Optimizer]:
    """Return the parts and the optimizer: all that takes seconds to import, build or start.

    It needs no other rank, so that in an elastic job nobody waits for a newcomer that builds. Raises UsageError as
    `build` does, and where weights, parameters or buffers are named that the model does not have.
    """
    parts = build(config, world.place, own)
    if config.precision.deterministic:
        check_deterministic(_trial(config, parts), config.model.model)
    if config.model.sync_batch_norm:
        parts = replace(parts, model=normalization.synchronised(parts.model, world))
    if config.model.weights is not None:
        name, outputs = config.model.model, parts.meter.task.outputs or 0
        note = weights.start_from(config.model.weights, parts.model, name, outputs)
        parts = replace(parts, notes=(*parts.notes, note))
    freeze.prepare(config.model, parts.model)
    buffers.averaged(parts.model, config.model.average_buffers)
    optimizer = optim.build(config.optimizer, parts.model)
    if config.precision.compile or first_step_is_slow(parts.device):
        _take_first_passes(config, world, parts)
    parts.train_loader.start()
    if launcher.elastic(os.environ):
        destinations.load(config.run.log_to)  # any rank may have to keep the journal from one step to the next
    return parts, optimizer


def share_weights(config: Config, world: World, state: TrainState) -> None:
    """Have the ranks of a host work on one copy of the weights, if the config allows it, and steps by shards.

    All ranks have the same state. Raises RankLost.
    """
    chosen = config.run.shared_weights
    # Each weight must be updated for itself, and its gradient must be what was summed.
    possible = chosen != "off" and optim.is_elementwise(state.optimizer) and not state.scaler.is_enabled()
    if possible and world.share_weights(state.optimizer, small=chosen == "on"):
        return_freed_memory()  # of the weights that were this rank's own


def first_step_is_slow(device: torch.device) -> bool:
    """Return whether a rank pays for its first step in time of others: in an elastic job they wait for a newcomer's.

    On a GPU, cuDNN tries its algorithms then, and kernels are loaded.
    """
    return device.type == "cuda" and launcher.elastic(os.environ)


def _take_first_passes(config: Config, world: World, parts: Parts) -> None:
    """Take the first passes of each kind, compiled if that is asked for, before the ranks of an elastic job have met.

    The cut is that of a run which starts now. A newcomer to another one is served too, by a program for any size.
    """
    num_samples = parts.train_loader.num_samples
    elastic = launcher.elastic(os.environ)
    if config.precision.compile:
        alone = world.place.size == 1 and not elastic  # no gradient has to travel, and one program is faster
        compile_blocks([parts.model] if alone else blocks_of(parts.model), for_any_size=elastic)
    try:
        cut = order.choose_cut(config.batch, world.place.size, num_samples)
    except UsageError:  # it is the ranks that have met who say so: a newcomer takes the cut of the run
        cut = None
    if cut is None or config.model.sync_batch_norm:  # whose layers exchange numbers with other ranks in each pass
        return
    train_sizes = slot_sizes(cut, num_samples)
    eval_sizes: list[int] = []
    if parts.val_loader is not None and config.optimizer.ema_decay is None:  # the moving average is not compiled
        batch = config.batch.eval_batch_size
        eval_sizes = slot_sizes(order.Cut(batch, batch), parts.val_loader.num_samples)
    freeze.apply(config.model, parts.model, 0)
    with enough_for_passes(config.batch, cut, parts.device):
        pass_through(
            _trial(config, parts),
            train_sizes=any_size(train_sizes) if config.precision.compile and elastic else train_sizes,
            eval_sizes=eval_sizes,
        )
    freeze.prepare(config.model, parts.model)


def _trial(config: Config, parts: Parts) -> Trial:
    task, (inputs, targets) = parts.meter.task, parts.example
    return Trial(
        parts.model, task.forward, task.loss, inputs, targets, autocast(config.precision.precision, parts.device)
    )


def build(config: Config, place: Place, own: Own = NOTHING, adapt: sources.Adapt = sources.as_it_is) -> Parts:
    """Return the parts of this rank, on the data set that `adapt` makes of that of the config.

    Raises UsageError where device, data, task or model cannot be had or do not fit together, and OutOfMemory where the
    model does not fit into the memory.
    """
    device = choose_device(config, place)
    if config.data.decode == "gpu":
        gpu_decoder.check(device)
    opened = sources.open_data(
        config.data, config.seed, own.data, of_classes=built_in.is_of_classes(config.task, own.task)
    )
    data = adapt(opened, config.data)
    task = built_in.open_task(config, data, own.task)
    _check_is_of_images(config.data, task)
    _check_is_collated(data, task)
    if data.mean and config.model.weights is not None and not weights.is_file(config.model.weights):
        data = replace(data, mean=IMAGENET_MEAN, std=IMAGENET_STD)  # as the weights have seen images
    num_workers = loader_processes(config.data, place)
    colour = own.model is None and models.needs_colour(config.model.model)
    size = None if isinstance(data.train, EncodedImages) else config.data.image_size  # those come in theirs
    channels_last = uses_channels_last(config, device)
    changed: Preparation = AsTheyAre()
    plain: Preparation = AsTheyAre()
    if _has_images(data):
        changed, plain = (
            Prepare(data, device, image_size=size, augment=augment, colour=colour, channels_last=channels_last)
            for augment in (data.augment, None)
        )
    train_loader, val_loader, test_loader = (
        None if source is None else open_loader(source, prepare, device, config.seed, num_workers, task.collate)
        for source, prepare in ((data.train, changed), (data.val, plain), (data.test, plain))
    )
    assert train_loader is not None
    goals.check(config.schedule, task, can_evaluate=val_loader is not None)
    network = models.build(
        config.model.model,
        num_outputs=task.outputs,
        channels=3 if colour and _has_images(data) else data.channels,
        seed=config.seed,
        own=own.model,
    )
    with enough_for("for the model alone", device, "see who else uses it: type nvidia-smi, or free"):
        network = network.to(device)
        for module in task.modules:
            module.to(device).eval().requires_grad_(False)
        if channels_last:
            network = network.to(memory_format=torch.channels_last)
        example = _example(data, task, plain, device)
        meter = fit(task, network, config.model.model, *example, autocast(config.precision.precision, device))
    shared = device.type == "cuda" and place.local_size > torch.cuda.device_count() and gpus_may_be_shared()
    sharing = "ranks share GPUs, as NCCL_MULTI_RANK_GPU_ENABLE=1 allows" if shared else None
    unit = "images" if _has_images(data) else "samples"
    notes = tuple(note for note in (data.note, sharing) if note is not None)
    return Parts(device, data, network, train_loader, val_loader, test_loader, meter, example, unit, notes)


def fresh_state(
    config: Config, world: World, parts: Parts, optimizer: Optimizer, cut: order.Cut = order.UNDECIDED
) -> TrainState:
    """Return the state before the first step.

    Raises UsageError where these ranks cannot reduce as the config says, or the weights cannot be in its format.
    """
    if config.run.weights_format == "safetensors" and (why := safetensors_file.why_not(parts.model.state_dict())):
        raise UsageError(f"--weights-format safetensors: {why}; type --weights-format pt")
    reduction = Reduction(
        wire=wire_dtype(config, parts.device),
        adasum=config.optimizer.reduction == "adasum",
        predivide=config.optimizer.gradient_predivide_factor,
        groups=config.optimizer.fusion_groups,
    )
    # It copies the model: not with Horovod's hooks on it.
    average = optim.moving_average(config.optimizer, parts.model, config.model.average_buffers)

    def wrap(one: Optimizer) -> Optimizer:
        return world.wrap(one, parts.model, reduction)

    return TrainState(
        model=parts.model,
        optimizer=optimizer.replaced(wrap) if isinstance(optimizer, Several) else wrap(optimizer),
        scaler=loss_scaler(config, parts.device),
        cut=cut,
        average=average,
    )


def build_steps(
    config: Config,
    world: World,
    parts: Parts,
    split: Split,
    handover: Handover | None = None,
    memory: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Steps:
    """Return what opens the optimizer steps of a training; the last three are as in `Steps`."""
    return Steps(config, world, parts.model, parts.device, parts.meter.training, split, handover, memory)


def passes_of(config: Config, parts: Parts) -> Passes:
    """Return what is done with the slots of a training by its task."""
    return Passes(config, parts.model, parts.device, parts.meter, mixer(config.data, len(parts.data.classes)))


def mixer(config: DataConfig, num_classes: int) -> Mixer:
    """Return what blends the images of a micro-batch: mixup, cutmix, one of the two by chance, or neither."""
    if not (config.mixup or config.cutmix):
        return unmixed
    from hvd_train.data.transforms import Mix  # slow to import

    return Mix(config, num_classes)


def loader_processes(data: DataConfig, place: Place) -> int:
    """Return how many loader processes a rank has for each set of files."""
    if data.workers_per_host is not None:
        return -(-data.workers_per_host // place.local_size)
    return min(_LOADER_PROCESSES, num_cores(place)) if data.workers is None else data.workers


def _check_is_of_images(data: DataConfig, task: Task) -> None:
    """Raise UsageError where images are to be changed in ways that the targets of the task would have to follow."""
    changes = {"--mixup": data.mixup, "--cutmix": data.cutmix, "--random-erasing": data.random_erasing}
    changes["--augment"] = data.augment not in ("standard", "none")
    wrong = [flag for flag, is_set in changes.items() if is_set]
    if wrong and not task.images_of_classes:
        raise UsageError(f"{wrong[0]} is for tasks whose targets are class numbers; make such changes in the data set")


def _check_is_collated(data: DataSet, task: Task) -> None:
    """Raise UsageError where a task has a collate of its own, and the data are no items that it could be given."""
    if task.collate is not None and any(isinstance(part, Arrays) for part in (data.train, data.val, data.test)):
        raise UsageError(
            "the task has a `collate`, which makes batches of items, and the data are tensors in memory; return a "
            "map-style data set of your own"
        )


def _has_images(data: DataSet) -> bool:
    """Return whether inputs are images, [c, h, w] each, which are scaled and normalised on the device."""
    if isinstance(data.train, Arrays):
        return isinstance(data.train.inputs, Tensor) and data.train.inputs.ndim == 4
    image = data.train[0][0]
    return isinstance(image, Tensor) and image.ndim == 3


def _example(data: DataSet, task: Task, prepare: Preparation, device: torch.device) -> tuple[Tree, Tree]:
    if isinstance(data.train, Arrays):
        rows = torch.arange(2) % data.train.rows
        inputs, targets = (mapped(lambda t: t[rows], tree) for tree in (data.train.inputs, data.train.targets))
    else:
        inputs, targets = collated([data.train[0]] * 2, task.collate)
    inputs, targets = (mapped(lambda tensor: tensor.to(device), tree) for tree in (inputs, targets))
    return prepare(inputs, None), targets
