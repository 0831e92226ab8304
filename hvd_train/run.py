"""The composition root: connect, build the parts from facts, train or evaluate, return a result."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hvd_train import by_task, checkpoint, config_file, console, loop, plugin, remote_url, state, weights_file
from hvd_train._version import __version__, digest_of_code
from hvd_train.config import Config
from hvd_train.data import sources
from hvd_train.data.batches import Loader
from hvd_train.data.dataset import SplitName
from hvd_train.data.sources import OwnData
from hvd_train.errors import UsageError
from hvd_train.launch import crashes, launcher, rank_log, tuned
from hvd_train.network import freeze, models, optim, safetensors_file, weights
from hvd_train.network.device import autocast, check_own_gpus, gpu_identity
from hvd_train.network.models import Builder
from hvd_train.parts import NOTHING, Own, Parts, build, passes_of, warm_parts
from hvd_train.plugin import OWN
from hvd_train.progress import schedule
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result
from hvd_train.run_files import destinations, remote, run_folder
from hvd_train.tasks import built_in
from hvd_train.tasks.built_in import OwnTask
from hvd_train.tasks.task import Task
from hvd_train.training import Training
from hvd_train.validate import Scores
from hvd_train.validate import evaluate as evaluate_model
from hvd_train.world.world import LocalWorld, Place, World, together


def train(
    config: Config,
    *,
    model: Builder | None = None,
    data: OwnData | None = None,
    task: OwnTask | None = None,
    world: World | None = None,
) -> Result:
    """Train as `config` says, on the ranks that the launcher has started, or alone; return how it ended.

    `model(num_classes)` and `data(config.data)` bring your own network and (training set, validation set or None), and
    `task` is your own Task, or a function that returns it for a data set; they take the place of `config.model`,
    `config.data` and `config.task`. Raises UsageError for settings or data that cannot be used, RankLost when another
    rank ends, ReplicasDiffer should the ranks come apart.
    """
    console.outlive()
    own = Own(model, data, task)
    config = prepared(_with_own_names(config, own))
    with (
        # A worker whose ssh is lost is not stopped by that: its heartbeats tell whether the job goes on.
        StopSignal(hangup=not launcher.elastic(os.environ)) as stop,
        closing(world or connect(config)) as here,
        closing(Training(config, here, stop, lambda: warm_parts(config, here, own))) as training,
    ):
        passes = passes_of(config, training.parts)
        by_task.train(training.steps(), passes, lambda: loop.evaluated(training.job))
        assert training.result is not None
        return training.result


def prepared(config: Config) -> Config:
    """Return the config of a training that is about to begin, once it is checked; the log of this rank begins.

    Raises UsageError as `check` does.
    """
    config = run_folder.named_by_resume(config)
    check(config)
    if config.run.log_dir is not None:
        rank_log.start(config.run.log_dir, os.environ)
    return config


def evaluate(
    target: Path,
    *,
    model: Builder | None = None,
    data: OwnData | None = None,
    task: OwnTask | None = None,
    world: World | None = None,
    device: str | None = None,
    trust: bool = False,
    data_dir: Path | None = None,
    split: SplitName = "val",
) -> Scores:
    """Return the scores of a run (its best weights), a checkpoint or a file of weights, as training measured them.

    `model`, `data` and `task` are those that `train` was given, if it was. Code that the run names is imported only
    with `trust`. `data_dir` takes the place of that in the config. The training set comes without random changes.
    Raises UsageError where `target` holds no trained model or names code that is not trusted, or the data have no such
    split.
    """
    world = world or connect()
    try:
        return world.run(
            lambda: _evaluate(target, world, device, Own(model, data, task), split, trust=trust, data_dir=data_dir)
        )
    finally:
        world.close()


def check(config: Config) -> None:
    """Raise UsageError for what can be known to be wrong before the ranks meet."""
    if url := remote_url.url_of(config.run.output_dir or ""):
        remote.check(url)
    if config.data.data != OWN:
        sources.check_name(config.data.data)
    if config.task.task != OWN:
        built_in.check_name(config.task)
    if config.model.model != OWN:
        models.check_name(config.model.model)
    if config.model.weights is not None:
        weights.check(config.model.weights, config.model.model)
    if config.run.weights_format == "safetensors":
        safetensors_file.check_library("--weights-format safetensors")
    freeze.check(config.model)
    optim.check(config.optimizer)
    schedule.check(config.schedule)
    if config.optimizer.reduction == "adasum" and launcher.elastic(os.environ):
        raise UsageError("--reduction adasum does not go with an elastic job: workers come and go in any number")
    if config.run.tuned is not None:
        tuned.read(config.run.tuned)
        if launcher.elastic(
            os.environ
        ):  # a process of Horovod 0.28.1 with such settings does not survive a second init
            raise UsageError("--tuned does not go with an elastic job: Horovod cannot take the settings twice")
    if config.run.profile is not None and os.environ.get(launcher.TIMELINE, launcher.ON_DEMAND) != launcher.ON_DEMAND:
        raise UsageError(f"--profile writes Horovod's timeline itself: unset {launcher.TIMELINE}")
    if launcher.may_write(os.environ):
        destinations.check(config.run.log_to)
    resume = run_folder.named_by_resume(config).run.resume
    named = resume not in ("auto", "never") and not launcher.goes_on(os.environ)  # then the job has read it
    if named and not Path(resume).is_file():
        raise UsageError(f"--resume {resume}: no such file; it must be auto, never, a run folder or a checkpoint file")


def connect(config: Config | None = None) -> World:
    """Return the world of the ranks that the launcher has started, or the world of one.

    Raises UsageError for several ranks without Horovod, or of a launcher that it does not know, and where the ranks
    have different versions or settings.
    """
    launcher.check(os.environ, sys.argv)
    launched = launcher.launched(os.environ)
    if launched is None:
        return LocalWorld()
    rank_log.whole_lines()
    crashes.tell_where(os.environ)
    try:
        from hvd_train.world.elastic_world import ElasticWorld
        from hvd_train.world.horovod_world import HorovodWorld
    except ImportError as error:
        if launched.size == 1:
            return LocalWorld()
        raise UsageError(
            f"{launched.launcher} started {launched.size} ranks, but Horovod cannot be imported ({error}): "
            "type `python packaging/build_horovod.py` in a checkout of hvd_train, or `make env` there"
        ) from error
    if config is not None and config.run.tuned is not None:
        tuned.apply(tuned.read(config.run.tuned), os.environ)
    if config is not None and config.run.profile is not None:
        os.environ[launcher.TIMELINE] = launcher.ON_DEMAND
    return (ElasticWorld if launcher.elastic(os.environ) else HorovodWorld)(facts=same_everywhere(config))


OF_EACH_HOST = {"cache_dir", "data_dir", "gpu_ids", "log_dir", "tuned", "workers", "workers_per_host"}
"""Settings in which ranks may differ: where a host has its data and keeps images, and what it has to work with."""


def same_everywhere(config: Config | None) -> dict[str, str]:
    """Return what every rank of a job must have in common: versions, and the value of each flag that may not differ."""
    found = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "Horovod": metadata.version("horovod"),
        "hvd_train": f"{__version__} ({digest_of_code()})",
    }
    if config is not None:
        settings = {name: value for name, value in config.settings().items() if name not in OF_EACH_HOST}
        found |= {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}
        if config.run.tuned is not None:
            found["--tuned"] = ", ".join(f"{name}={value}" for name, value in tuned.read(config.run.tuned).items())
    return found


def _evaluate(
    target: Path,
    world: World,
    device: str | None,
    own: Own,
    split: SplitName,
    *,
    trust: bool,
    data_dir: Path | None,
) -> Scores:
    adapt = sources.unchanged if split == "train" else sources.as_it_is
    config, parts = together(
        world,
        lambda: trained_parts(target, world.place, device, own, trust=trust, data_dir=data_dir, adapt=adapt),
    )
    check_own_gpus(world.gather(gpu_identity(parts.device)))
    return evaluate_model(
        parts.model,
        loader_of(parts, split, target),
        world,
        micro_batch=config.batch.eval_batch_size,
        meter=parts.meter,
        device=parts.device,
        autocast=autocast(config.precision.precision, parts.device),
    )


def trained_parts(
    target: Path,
    place: Place,
    device: str | None = None,
    own: Own = NOTHING,
    *,
    trust: bool = False,
    data_dir: Path | None = None,
    adapt: sources.Adapt = sources.as_it_is,
    workers: int | None = None,
) -> tuple[Config, Parts]:
    """Return the config of a run, checkpoint or file of weights, and its parts with the trained weights.

    `own`, `trust` and `data_dir` are as in `evaluate`, `adapt` is as in `parts.build`, and `workers` is the number of
    loader processes where it is not to be that of the config. Raises UsageError where the target cannot be read or
    used, and Untrusted, before anything is imported, where it names code that `own` does not stand for.
    """
    config, trained = read_target(target)
    config = dataclasses.replace(config, task=config.task.evaluated_as)
    config = config.replace(
        cache="none", cache_dir=None, download=False
    )  # evaluation sees the same without, and writes nowhere
    if data_dir is not None:
        if config.data.data in ("digits", "synthetic", "diabetes", "digit-shapes", "python-docs"):
            raise UsageError(
                f"--data-dir {data_dir}: {target} was trained on {config.data.data}, which are in no folder"
            )
        config = config.replace(data_dir=data_dir)
    if workers is not None:
        config = config.replace(workers=workers, workers_per_host=None)
    if device is not None:
        config = config.replace(device=device, decode="cpu" if device == "cpu" else config.data.decode)
    named = {"model": config.model.model} if own.model is None else {}
    named |= {"data": config.data.data} if own.data is None else {}
    named |= {"task": config.task.task} if own.task is None else {}
    for kind, name in named.items():
        if name == OWN and config.is_of_program:
            raise UsageError(
                f"{target} was trained with a model, data and a task that only its program knows: call "
                "hvd_train.evaluate(run, model=..., data=..., task=...) there, or session.evaluate in a loop of its own"
            )
        if name == OWN:
            raise UsageError(
                f"{target} was trained with a {kind} that only its script knows: call "
                "hvd_train.evaluate(run, model=..., data=..., task=...) from there"
            )
    if not trust:
        plugin.check_trusted(str(target), named)
    parts = build(config, place, own, adapt)
    state.check_same_shapes(parts.model.state_dict(), trained)
    parts.model.load_state_dict(trained)
    return config, parts


def loader_of(parts: Parts, split: SplitName, target: Path) -> Loader:
    """Return the loader of a split. Raises UsageError, which names the target, where its data have none."""
    loader = {"train": parts.train_loader, "val": parts.val_loader, "test": parts.test_loader}[split]
    if loader is None:
        names = {"train": "training", "val": "validation", "test": "test"}
        raise UsageError(f"{target}: its data set has no {names[split]} set")
    return loader


def read_target(target: Path) -> tuple[Config, dict[str, torch.Tensor]]:
    """Return the config and the weights of a run folder (its best ones), a checkpoint, or a file of weights in a run.

    Raises UsageError where there are none, or where they cannot be read.
    """
    if url := remote_url.url_of(target):
        with TemporaryDirectory(prefix="hvd_train-") as folder:
            run = Path(folder, remote_url.name_of(url))
            run.mkdir()
            remote.check(url, "")
            remote.fetch_newest(
                url, run, lambda name: name == run_folder.CONFIG or name.startswith("model-"), console.say
            )
            config, trained = read_target(run)
            return config, {name: tensor.clone() for name, tensor in trained.items()}  # not of a file that is gone
    if target.is_dir():
        config = config_file.load(target / run_folder.CONFIG)
        found = weights_file.found_in(target, checkpoint.BEST) or weights_file.found_in(target, checkpoint.FINAL)
        if found is None:
            raise UsageError(f"{target} has no {checkpoint.BEST} yet: it was stopped before its first evaluation")
        return config, _weights_in(found)
    if not target.exists():
        raise UsageError(f"{target}: no such run folder, checkpoint or file of weights")
    if weights.holds_weights_alone(target):
        beside = target.parent / run_folder.CONFIG
        if not beside.is_file():
            raise UsageError(
                f"{target} holds weights alone, and what they are of stands in the {run_folder.CONFIG} of their run: "
                "put that beside the file, or name the run folder or a checkpoint"
            )
        return config_file.load(beside), _weights_in(target)
    snapshot = checkpoint.read_named(target)
    return config_file.from_dict(snapshot["config"], source=str(target)), state.result_in(snapshot)


def _weights_in(path: Path) -> dict[str, torch.Tensor]:
    """Return the plain state_dict in a file. Raises UsageError where there is none."""
    try:
        found = weights.tensors_in(path)
    except weights.UNREADABLE as error:
        raise UsageError(f"cannot read the weights {path}: {weights.why_unreadable(error)}") from None
    if not weights.is_state_dict(found):
        raise UsageError(f"{path} holds no weights: it must be a plain state_dict, of names and tensors")
    return found


def _with_own_names(config: Config, own: Own) -> Config:
    """Return the config with the names of the user's functions, by which `evaluate` and `--config` find them.

    Raises UsageError for what is no function.
    """
    changes: dict[str, Any] = {}
    if isinstance(own.model, torch.nn.Module):
        raise UsageError("model must be a function of the number of classes that returns the network, not the network")
    if own.data is not None and not callable(own.data):
        raise UsageError("data must be a function of config.data that returns (training set, validation set or None)")
    if own.task is not None and not (callable(own.task) or isinstance(own.task, Task)):
        raise UsageError("task must be an hvd_train.Task, or a function of the data set that returns one")
    if own.model is not None:
        changes["model"] = reference(own.model)
    if own.data is not None:
        changes["data"] = reference(own.data)
    if own.task is not None:
        changes["task"] = OWN if isinstance(own.task, Task) else reference(own.task)
    return config.replace(**changes)


def reference(function: Callable[..., Any]) -> str:
    """Return `module:function` for a function that can be imported again (from its script as well), else OWN."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    return f"{module}:{name}" if module and f"{module}{name}".replace(".", "").isidentifier() else OWN
