"""Build the parts of a rank from the config: device, data, loaders, model and the first state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from hvd_train.config import Config, DataConfig
from hvd_train.data import identity, per_sample, sources
from hvd_train.data.dataset import Augment, DataSet, Source
from hvd_train.data.identity import Identity
from hvd_train.data.loader import Collate, Loader, Prepare, open_loader
from hvd_train.data.own_order import OwnOrder, digest_of_orders, orders_of
from hvd_train.data.sources import OwnData
from hvd_train.errors import UsageError, first_line, flag, place_in_user_code
from hvd_train.history import History
from hvd_train.network import buffers, freeze, models, normalization, optim, weights
from hvd_train.network.device import (
    arithmetic,
    autocast,
    choose_device,
    loss_scaler,
    notes_on_arithmetic,
    num_cores,
    uses_channels_last,
    wire_format,
)
from hvd_train.network.models import Builder, micro_batch_sizes
from hvd_train.progress import order
from hvd_train.progress.order import ORDERS, Indices, Orders
from hvd_train.progress.sampling import BucketOrder, Numbers, drawn_by
from hvd_train.progress.shard_order import ShardOrder
from hvd_train.recheck import NOT_COMPARED
from hvd_train.state import TrainState
from hvd_train.tasks.builtin import CLASSIFICATION, OwnTask, open_task
from hvd_train.tasks.task import (
    LOSS,
    Goal,
    Measuring,
    Task,
    goal_of,
    kept_of,
    numbers_of,
    sum_of,
    targets_of,
)
from hvd_train.validate import scores_of
from hvd_train.world.world import Place, World

if TYPE_CHECKING:
    from hvd_train.data.shards import Shards

Optimizers = Mapping[str, Optimizer]
"""Optimizers by name; a single one has the name ""."""
_LOADER_PROCESSES = 4  # usually enough to keep a GPU busy


@dataclass(frozen=True)
class Own:
    """What the user brings from Python; the rest is what the config names."""

    model: Builder | None = None
    data: OwnData | None = None
    task: Task | OwnTask | None = None


NOTHING = Own()


@dataclass(frozen=True)
class Parts:
    """The parts that each rank builds alone, before it communicates."""

    device: torch.device
    data: DataSet
    identity: Identity  # of the data
    task: Task
    training: dict[str, Measuring]  # of the updates of each optimizer
    evaluation: Measuring
    goal: Goal  # which evaluation is the best
    model: nn.Module
    train_loader: Loader
    val_loader: Loader | None
    test_loader: Loader | None
    orders: Orders = ORDERS["shuffled"]  # of the training set
    shards: "Shards | None" = None  # the training set, if it is fetched in that order
    sample_weights: Numbers | None = None  # by which its samples are drawn
    heads: tuple[str, ...] = ()  # the layers that `--freeze backbone` leaves out
    notes: tuple[str, ...] = ()  # lines for the user about the start of a fresh training
    # the steps from one comparison of ranks to the next, unless the user names them
    recheck_steps: int = 500  # a pass of one in so many steps costs 0.2% at most


def warm_parts(config: Config, world: World, own: Own = NOTHING) -> tuple[Parts, Optimizers]:
    """Return the parts and the optimizer, built and started without other ranks.

    Raises UsageError.
    """
    parts = _in_its_order(config, build(config, world.place, own))
    notes = notes_on_arithmetic(config, parts.device, parts.model)
    if config.model.sync_batch_norm:
        normalization.synchronise(parts.model, world)
        if config.run.recheck_steps != 0:
            notes.append(NOT_COMPARED.format("passes need other ranks (--sync-batch-norm)"))
    if config.model.weights is not None:
        name = config.model.model
        classes = len(parts.data.classes)
        notes.append(weights.start_from(config.model.weights, parts.model, name, classes))
    parts = replace(
        parts, notes=(*notes, *freeze.described(config.model, parts.model, parts.heads))
    )
    weights.check_state(parts.model, config.run.weights_format)
    # The optimizer takes all parameters that train in any epoch.
    freeze.apply(config.model, parts.model, heads=parts.heads)
    optimizer = optim.build(config.optimizer, parts.model)
    if config.precision.compile:
        _compile(config, world, parts)
    parts.identity["items"]["training"] = parts.train_loader.start()
    return parts, {"": optimizer}


def _compile(config: Config, world: World, parts: Parts) -> None:
    """Compile the model as far as possible without other ranks.

    Raises UsageError if the batch is too large.

    torch.compile compiles at the first pass with each size of batch: after the rendezvous all ranks
    would wait for it.
    """
    model = parts.model
    loader = parts.train_loader
    precision = autocast(config, parts.device)
    model.compile()
    if config.model.sync_batch_norm:  # its layers communicate in each pass
        return
    layout = order.choose_layout(config.batch, world.place.size, loader.num_samples)
    freeze.apply(config.model, model, 0, parts.heads)
    with (
        buffers.unchanged(model),
        torch.random.fork_rng([parts.device] if parts.device.type == "cuda" else []),
    ):
        for size in micro_batch_sizes(layout, loader.num_samples):
            with precision:
                loss = sum_of(parts.task.measure(model, loader.example(size))[LOSS])
            torch.autograd.grad(
                loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True
            )
        # the moving average is not compiled
        if parts.val_loader is not None and config.optimizer.ema_decay is None:
            model.eval()
            batch = config.batch.eval_batch_size
            with torch.no_grad(), precision:
                for size in micro_batch_sizes(
                    order.BatchLayout(batch, batch), parts.val_loader.num_samples
                ):
                    parts.evaluation.function(model, loader.example(size))
    freeze.apply(config.model, model, heads=parts.heads)


def build(config: Config, place: Place, own: Own = NOTHING, split: str | None = None) -> Parts:
    """Return the parts of this rank; with a `split`, it is the validation set
    and need be the only one.

    Raises UsageError if the device, the data or the model is not available.
    """
    device = choose_device(config, place)
    data = _open_data(config, own, split)
    task = open_task(config, data.classes, own.task)
    for constant in task.constants:
        constant.to(device).eval().requires_grad_(requires_grad=False)
    schedule = config.schedule
    if (targets_of(task, schedule) or schedule.patience) and data.val is None:
        raise UsageError("--target and --patience need a validation set; the data have none")
    goal = goal_of(task, schedule.best_by, "--best-by")
    colour = own.model is None and models.needs_colour(config.model.model)
    network = _network(config, own, device, len(data.classes), 3 if colour else data.channels)
    suits = own.model is None and models.suits_channels_last(config.model.model, network)
    channels_last = uses_channels_last(config, device, suits=suits)
    if channels_last:
        models.put_channels_last(network)
    loaders = _loaders(
        config, place, data, task, device, colour=colour, channels_last=channels_last
    )
    of_data = {**identity.of(data), "items": _digests_of_others(data, loaders)}
    examples = [loader.example(2) for loader in loaders.values()]
    try:
        training, evaluation = _measurings(task, network, examples)
        heads = _heads(task, network, examples[0]) if config.model.freeze == "backbone" else ()
    except (RuntimeError, ValueError, AssertionError) as error:  # torch's and torchvision's
        why = first_line(error) + place_in_user_code(error)
        if channels_last and "view size is not compatible" in why:
            why += "; or type --channels-last off"
        raise UsageError(
            f"model {config.model.model} cannot take the first two samples: {why}"
        ) from None
    return Parts(
        device=device,
        data=data,
        identity=of_data,
        task=task,
        training={"": training},
        evaluation=evaluation,
        goal=goal,
        model=network,
        train_loader=loaders["training"],
        val_loader=loaders.get("validation"),
        test_loader=loaders.get("test"),
        heads=heads,
    )


def _open_data(config: Config, own: Own, split: str | None) -> DataSet:
    """Return the data; torchvision's weights need their own normalisation. Raises UsageError."""
    classifies = own.task is None and config.model.task == CLASSIFICATION
    data = sources.open_data(
        config.data, config.seed, own.data, any_items=not classifies, split=split
    )
    if data.mean and _has_weights_of_torchvision(config):
        mean, std = weights.normalisation(str(config.model.weights), config.model.model)
        return replace(data, mean=mean, std=std)
    return data


def _has_weights_of_torchvision(config: Config) -> bool:
    chosen = config.model.weights
    return chosen is not None and not weights.is_file(chosen)


def _loaders(
    config: Config,
    place: Place,
    data: DataSet,
    task: Task,
    device: torch.device,
    *,
    colour: bool,
    channels_last: bool,
) -> dict[str, Loader]:
    """Return the loader of each set: training, and if there are any, validation and test."""
    num_workers = loader_processes(config.data, place)
    collate = task.collate or default_collate
    # its images have their own size
    size = None if config.data.has_files else config.data.image_size
    # in half precision the last bits of an image do not matter
    in_one_pass = device.type == "cuda" and arithmetic(config, device) != "fp32"

    def loader_of(source: Source, augment: Augment | None) -> Loader:
        prepare = Prepare(
            data,
            device,
            image_size=size,
            augment=augment,
            colour=colour,
            channels_last=channels_last,
            in_one_pass=in_one_pass,
        )
        return open_loader(
            source,
            prepare if data.images else None,
            device,
            config.seed,
            num_workers,
            collate,
            task.check,
        )

    loaders = {"training": loader_of(data.train, data.augment)}
    for title, source in (("validation", data.val), ("test", data.test)):
        if source is not None:
            loaders[title] = loader_of(source, None)
    return loaders


def _digests_of_others(data: DataSet, loaders: Mapping[str, Loader]) -> dict[str, str]:
    """Return a digest of items of the sets that are not trained. Raises UsageError."""
    digests = {}
    for title, source in (("validation", data.val), ("test", data.test)):
        if title in loaders:
            sources.check_apart(data.train, source)
            digests[title] = loaders[title].digest()
    return digests


def _network(
    config: Config, own: Own, device: torch.device, num_classes: int, channels: int
) -> nn.Module:
    """Return the model on the device, with random weights. Raises UsageError."""
    name = config.model.model
    network = models.build(
        name, num_classes=num_classes, channels=channels, seed=config.seed, own=own.model
    )
    network = network.to(device)
    if _has_weights_of_torchvision(config) and hasattr(network, "transform_input"):
        # GoogLeNet and Inception v3 normalise again
        network.transform_input = True  # type: ignore[assignment]
    return network


def of_a_loop(
    config: Config,
    world: World,
    model: nn.Module,
    optimizers: Optimizers,
    data: Any,
    collate: Collate,
    own_order: OwnOrder | None = None,
    given: Any = None,
) -> tuple[Parts, Optimizers]:
    """Return the parts of a training whose loop is the user's.

    `given` are the weights or lengths of samples, if no setting names them.
    Raises UsageError for what cannot be trained.
    """
    weights.check_state(model, config.run.weights_format)
    optim.check_parameters(model, optimizers)
    source = sources.of_program(data)
    device = choose_device(config, world.place)
    model.to(device)
    if config.precision.channels_last == "on":  # else it stays as the program has made it
        models.put_channels_last(model)
    if config.model.sync_batch_norm:
        normalization.synchronise(model, world)
    loader = open_loader(
        source.train, None, device, config.seed, loader_processes(config.data, world.place), collate
    )
    task = Task(Mapping.get, best="")  # type: ignore[arg-type]  # the user's loop measures
    measuring = {name: Measuring(task.measure, of_a_loop=True) for name in optimizers}
    evaluation = Measuring(task.measure)
    goal = Goal("best", higher=True)
    parts = Parts(
        device,
        source,
        identity.of(source),
        task,
        measuring,
        evaluation,
        goal,
        model,
        loader,
        None,
        None,
        notes=tuple(notes_on_arithmetic(config, device, model)),
        recheck_steps=0,  # the program would see more micro-batches
    )
    parts = _in_its_order(config, parts, own_order, given)
    parts.identity["items"] = {"training": loader.start()}
    return parts, optimizers


def _in_shards(config: Config, data: DataSet) -> Any:
    """Return the training set in shards, if it is read in their order; else None."""
    found = (each for each in sources.inner_sets(data.train) if hasattr(each, "shard_starts"))
    shards = next(found, None)
    is_read = config.batch.order == "shuffled" and config.batch.shuffle_window > 0
    return shards if is_read and shards is not None and len(shards) == len(data.train) else None


def _in_its_order(
    config: Config, parts: Parts, own_order: OwnOrder | None = None, given: Any = None
) -> Parts:
    """Return the parts with the orders of epochs, which become a part of the identity.

    `given` are the weights or lengths, if no setting names them. Raises UsageError.
    """
    batch = config.batch
    of_data = parts.identity
    shards = None if own_order else _in_shards(config, parts.data)
    setting = "length_buckets" if batch.sample_weights is None else "sample_weights"
    named = getattr(batch, setting)
    if named is not None:
        if shards is not None:
            raise UsageError(
                f"{flag(setting)}: add --shuffle-window 0, to read shards in any order"
            )
        numbers = _numbers(setting, named, given, parts.data.train)
        of_data["order"] = identity.digest_of_bytes(setting.encode() + numbers.tobytes())
        if setting == "sample_weights":
            return replace(parts, orders=drawn_by(numbers), sample_weights=numbers)
        return replace(parts, orders=lru_cache(1)(partial(BucketOrder, numbers)))
    if own_order is not None:
        of_data["order"] = digest_of_orders(own_order, config.seed, parts.train_loader.num_samples)
        # `Step.samples` asks for it again
        return replace(parts, orders=lru_cache(1)(orders_of(own_order)))
    if shards is None:
        return replace(parts, orders=ORDERS[batch.order])
    starts: Indices = shards.shard_starts
    window = batch.shuffle_window
    of_data["order"] = identity.digest_of_bytes(f"{window} {[*map(int, starts)]}".encode())
    orders = lru_cache(1)(partial(ShardOrder, starts, window))
    return replace(parts, orders=orders, shards=shards)


def _numbers(setting: str, named: str, given: Any, train: Source) -> Numbers:
    """Return the numbers of the training samples: given, or named by a setting.

    Raises UsageError.
    """
    title = f"{flag(setting)} {named}"
    if given is not None:
        title = f"Session({per_sample.ARGUMENTS[setting]}=...)"
    elif named.isidentifier():
        owners = [each for each in sources.inner_sets(train) if hasattr(each, named)]
        if not owners:
            raise UsageError(
                f"{title}: the training set has no such attribute; type a file as ./{named}"
            )
        given = getattr(owners[0], named)
    else:
        given = per_sample.read(title, Path(named))
    return per_sample.checked(title, given, len(train))


def _measurings(
    task: Task, network: nn.Module, examples: Sequence[Any]
) -> tuple[Measuring, Measuring]:
    """Return what training and evaluations measure, by batches of two samples:
    of the training set first.

    Raises UsageError if their measures cannot be used.
    """
    training = Measuring(task.measure)
    evaluation = Measuring(task.evaluate or task.measure)
    with torch.no_grad(), buffers.unchanged(network):
        network.eval()
        check = task.check or (lambda batch, samples: None)
        check(examples[0], np.arange(2))
        measured = training(network, examples[0], 2)
        if (
            training.means[0].kind == "count"
            and (count := numbers_of(measured, training.means, torch.float64)[1]) > 0
        ):
            training.expect(float(count) / 2)
        for example in examples:
            check(example, np.arange(2))
            evaluated = evaluation(network, example, 2)
        numbers = numbers_of(evaluated, evaluation.fields, torch.float64).cpu()
    scores_of(task, evaluation.fields, numbers, 2, kept_of(evaluated))
    return training, evaluation


def _heads(task: Task, network: nn.Module, example: Any) -> tuple[str, ...]:
    with buffers.unchanged(network):
        network.eval()
        return models.heads_of(network, lambda: sum_of(task.measure(network, example)[LOSS]))


def fresh_state(
    config: Config,
    world: World,
    parts: Parts,
    optimizers: Optimizers,
    layout: order.BatchLayout = order.UNDECIDED,
    history: History | None = None,
) -> TrainState:
    """Return the state before the first step, of a program with this history."""
    parameters = [*parts.model.parameters()]
    is_wide = any(
        parameter.dtype == torch.float64 or parameter.is_complex() for parameter in parameters
    )
    if config.precision.compression == "auto" and is_wide:
        config = config.replace(compression="none")
    scaler = loss_scaler(config, parts.device)
    if scaler.is_enabled() and any(parameter.is_complex() for parameter in parameters):
        raise UsageError(
            "complex parameters have no loss scale: leave out --precision fp16 "
            "and --compression fp16"
        )
    if not config.precision.is_exact:
        world.wrap(parts.model, wire_format(config, parts.device))
    decay = config.optimizer.ema_decay
    average = None if decay is None else optim.MovingAverage(parts.model, decay)
    return TrainState(
        model=parts.model,
        optimizers=optimizers,
        scaler=scaler,
        layout=layout,
        history=history or History(),
        average=average,
        data=parts.identity,
    )


def loader_processes(data: DataConfig, place: Place) -> int:
    """Return how many loader processes a rank has for each set of files."""
    return min(_LOADER_PROCESSES, num_cores(place)) if data.workers is None else data.workers
