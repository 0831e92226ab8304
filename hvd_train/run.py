"""The composition root: connect, build the parts from facts, train, evaluate or
predict, return a result.
"""

import dataclasses
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_train import checkpoint, config_file, console, loop, output, plain_file, plugin, state
from hvd_train._version import __version__, digest_of_code
from hvd_train.config import Config, config_of
from hvd_train.data import identity, sources
from hvd_train.data.identity import Identity
from hvd_train.data.random_numbers import seed_all
from hvd_train.data.sources import OwnData
from hvd_train.errors import UsageError, flag
from hvd_train.launch import cause, exit_report, launcher, stacks, workers
from hvd_train.loops import Loops
from hvd_train.membership import Membership
from hvd_train.network import freeze, models, weights
from hvd_train.network.models import Builder
from hvd_train.parts import NOTHING, Optimizers, Own, Parts, build, warm_parts
from hvd_train.progress import schedule
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result, Stopped
from hvd_train.run_files import commits, remote, run_folder, trackers
from hvd_train.tasks import builtin as tasks
from hvd_train.tasks.builtin import CLASSIFICATION, OwnTask
from hvd_train.tasks.task import Each, Measure, Measuring, Scores, Task
from hvd_train.validate import evaluate as evaluate_model
from hvd_train.world import known_answer
from hvd_train.world.world import AloneWorld, LocalWorld, Place, World, together


def train(
    config: Config,
    *,
    model: Builder | None = None,
    data: OwnData | None = None,
    task: Task | OwnTask | None = None,
    name: str = "",
    world: World | None = None,
) -> Result:
    """Train as `config` says, on the ranks that the launcher has started, or
    alone; return how it ended.

    `model(num_classes)` and `data(config.data)` bring your own network and (training set,
    validation set or None); `task`, a Task or a function `task(config)`, takes the place of
    classification. Of several trainings in a program each has a `name`, which is its folder in the
    run folder. Raises UsageError for settings or data that cannot be used, RankLost if another rank
    ends, ReplicasDiffer if the weights of the ranks differ.
    """
    config = config_of(config)
    if config.batch.on_resize == "per-worker" and config.optimizer.lr_scaling == "none":
        raise UsageError(
            "--on-resize per-worker changes the global batch: add --lr-scaling linear or sqrt"
        )
    own = Own(model, data, task)
    given = {name: value for name, value in vars(own).items() if value is not None}
    seed_all(config.seed)  # modules of the user may draw random numbers as they are imported
    # their names would be imported, perhaps this very script
    check(config.replace(**dict.fromkeys(given, OWN)), name)
    config = config.replace(**{name: reference(value) for name, value in given.items()})
    if given:
        config = of_script(config)
    with opened(config, name, world, lambda here: warm_parts(config, here, own)) as (ranks, stop):
        loops = Loops(ranks, stop)
        with suppress(Stopped), loops:
            loop.train(loops)
        return loops.result


@contextmanager
def opened(
    config: Config,
    name: str,
    world: World | None,
    build: Callable[[World], tuple[Parts, Optimizers]],
) -> Iterator[tuple[Membership, StopSignal]]:
    """Connect the ranks, or use `world`, and build what they train; close it after the block.

    Raises UsageError.
    """
    console.outlive()
    stacks.register()
    cause.show_native_crashes()
    with (
        # The driver decides what the loss of ssh means for a worker.
        StopSignal(hangup=not workers.elastic(os.environ)) as stop,
        connected(config, world) as here,
    ):
        begin(here, config, name)
        job = here
        replays = output.finished(here.joins_folder, config, name)
        here = job if replays is None else AloneWorld(job)
        parts, optimizers = here.prepare(lambda: _on_sound_device(config, build(here)))
        with closing(Membership(config, here, parts, optimizers, name, replays)) as ranks:
            yield ranks, stop


def _on_sound_device(config: Config, built: tuple[Parts, Optimizers]) -> tuple[Parts, Optimizers]:
    """Return what this rank has built. Raises RankDiffers if its device computes wrongly."""
    if config.run.recheck_steps != 0:
        known_answer.check(built[0].device, launcher.host_name(os.environ))
    return built


def begin(world: World, config: Config, name: str) -> None:
    """Begin the next training of a program.

    Raises UsageError if it may have the run folder of an earlier one.
    """
    begun = world.program.begun
    ended = world.program.ended
    if name and not re.fullmatch(r"[^\W_][\w-]*", name):
        raise UsageError(f"name={name!r} names a folder: take letters, digits, '_' and '-'")
    if name in run_folder.TAKEN:
        raise UsageError(f"name={name!r} is the name of another folder of a run: take another one")
    if ended and not ended[-1].finished:
        raise Stopped(ended[-1].exit_code)  # also for the trainings that would follow
    folder = config.run.output_dir and config.run.output_dir.absolute()
    elastic = workers.elastic(os.environ)
    mine = folder, name, None if folder or name or elastic else config.decisive()
    # whoever types, or runs a cell of a notebook again, knows
    if mine in begun and not hasattr(sys, "ps1"):
        if name:
            raise UsageError(
                f"two trainings of this program have the name {name!r}: give each its own"
            )
        raise UsageError(
            "this program has trained before, and each training needs its own folder: "
            f"name it, as in Session(..., name='part{len(begun) + 1}') or train(..., name=...)"
        )
    if elastic and begun and folder != begun[0][0]:
        raise UsageError(
            f"--output-dir {folder}: in an elastic job all trainings of a "
            "program have one; name them"
        )
    if elastic and name and config.run.resume != "auto":
        raise UsageError(
            f"--resume {config.run.resume}: with names, an elastic job starts again "
            "in a new --output-dir"
        )
    if begun:
        exit_report.training_begins()
    begun.append(mine)


# MPI cannot start again, so the ranks stay connected until the program ends
_KEPT: list[World] = []


@contextmanager
def connected(config: Config | None = None, world: World | None = None) -> Iterator[World]:
    """Give `world`, or else the world of this program, which stays connected
    unless an error ends the block.
    """
    if world is not None:
        with closing(world):
            yield world
        return
    if _KEPT:
        _KEPT[0].compare(same_everywhere(config))
    else:
        _KEPT.append(connect(config))
    try:
        yield _KEPT[0]
    except BaseException:
        if _KEPT:  # else an error has ended another training
            _KEPT.pop().close()
        raise


def evaluate(
    target: Path,
    *,
    model: Builder | None = None,
    data: OwnData | str | None = None,
    task: Task | OwnTask | None = None,
    world: World | None = None,
    device: str | None = None,
    data_dir: Path | None = None,
    split: str = "val",
    trust: bool = False,
) -> Scores:
    """Return the scores of a run (its best weights), a checkpoint or a run's model-best.pt,
    as training measured them.

    `model`, `data` and `task` are the arguments that `train` had. Other `data` (a name, too),
    `data_dir` or `split` (train, val or test) evaluate other samples. Code that the run names is
    imported only with `trust`. Raises UsageError if `target` is none of these, or names code that
    is not trusted.
    """
    changes: dict[str, Any] = {"device": device, "data_dir": data_dir}
    if isinstance(data, str):
        changes["data"], data = data, None
    own = Own(model, data, task)
    with connected(world=world) as connection:
        # A newcomer of an elastic job would meet ranks that are past this evaluation.
        here = AloneWorld(connection) if workers.elastic(os.environ) else connection
        build_parts = partial(
            trained_parts, target, here.place, own, trust=trust, split=split, **changes
        )
        config, parts = together(here, build_parts)
        here.compare(identity.facts(parts.identity))
        if parts.val_loader is None:
            raise UsageError(f"{target}: its data have no {split} set")
        scorer = parts.task, parts.evaluation, parts.model, parts.val_loader
        scores = evaluate_model(config, parts.device, *scorer, here)
    of_run = (
        "best weights"
        if (target / checkpoint.BEST).exists()
        else "last weights: the run has no best yet"
    )
    return dataclasses.replace(
        scores, weights=of_run if target.is_dir() else f"weights of {target.name}"
    )


_FEW = 64  # files that are read sooner than loader processes start


def predict(
    target: Path, files: Sequence[Path], *, top: int, device: str, trust: bool = False
) -> list[list[tuple[str, float]]]:
    """Return for each image the `top` classes and their probabilities, the
    most probable class first.

    `target` and `trust` are as in `evaluate`. Raises UsageError if the target or a file cannot be
    used.
    """
    workers = 0 if len(files) < _FEW else None
    config, parts = trained_parts(
        target, Place(), trust=trust, files=files, device=device, workers=workers
    )
    classes = parts.data.classes
    loader = parts.val_loader
    assert loader is not None

    def measure(model: nn.Module, batch: Any) -> dict[str, Measure]:
        best = model(batch[0]).float().softmax(1).topk(min(top, len(classes)))
        return {
            "highest": best.values[:, 0],
            "share": Each(best.values),
            "number": Each(best.indices),
        }

    scorer = Task(measure, best=""), Measuring(measure, trains=False), parts.model, loader
    scores = evaluate_model(config, parts.device, *scorer, LocalWorld())
    shares = scores.each("share").tolist()
    numbers = scores.each("number").int().tolist()
    return [
        [(classes[n], share) for n, share in zip(*row, strict=True)]
        for row in zip(numbers, shares, strict=True)
    ]


def check(config: Config, name: str = "") -> None:
    """Raise UsageError for what is wrong before the ranks connect; the training may have a name."""
    if not isinstance(name, str):
        raise UsageError(f"name={name!r} is no text: write name='fold{name}', for instance")
    check_names(config)
    if plugin.is_reference(config.optimizer.optimizer):
        plugin.load("optimizer", config.optimizer.optimizer)
    # it may be the user's function
    schedule.learning_rate_factor(config.schedule, config.schedule.warmup_epochs)
    if config.model.weights is not None:
        weights.check(config.model.weights, config.model.model)
    freeze.check(config.model)
    trackers.check(config.run.trackers)
    if config.run.copy_to is not None:
        remote.file_system(config.run.copy_to)
    if (
        config.run.weights_format == "safetensors"
        and importlib.util.find_spec("safetensors") is None
    ):
        raise UsageError(
            "--weights-format safetensors: safetensors is not installed: pip install safetensors"
        )
    # A job that continues has read the file.
    named = config.run.resume not in ("auto", "never") and not os.environ.get(workers.RUN_DIR)
    path = Path(config.run.resume, name)
    if named and not path.is_file() and not commits.committed(path):
        it_may_be = "auto, never, a checkpoint file, or a run folder with checkpoints"
        raise UsageError(f"--resume {path}: no such file; it must be {it_may_be}")


def check_names(config: Config, own: Own = NOTHING) -> None:
    """Raise UsageError for an unknown name of what is not the user's own."""
    for kind, name, check_name in (
        ("data", config.data.data, sources.check_name),
        ("model", config.model.model, models.check_name),
        ("task", config.model.task, tasks.check_name),
    ):
        if name != OWN and getattr(own, kind) is None:
            check_name(name)


def connect(config: Config | None = None) -> World:
    """Return the world of the launched ranks, or of one.

    Raises UsageError if they cannot form a world.
    """
    launcher.refuse_others(os.environ, ["python", *sys.argv])
    launched = launcher.launched(os.environ)
    is_elastic = workers.elastic(os.environ)
    if launched is None or (launched.size == 1 and not is_elastic):
        return LocalWorld()
    console.outlive()
    try:
        from hvd_train.world.elastic_world import ElasticWorld
        from hvd_train.world.horovod_world import HorovodWorld
    except ImportError as error:
        raise UsageError(
            f"{launched.launcher} started {launched.size} ranks, but Horovod cannot be "
            f"imported ({error}): type `python packaging/build_horovod.py` in a checkout of "
            "hvd_train, or `make env` there"
        ) from error
    facts = same_everywhere(config)
    if is_elastic:
        return ElasticWorld(facts)
    return HorovodWorld(facts, config_of(config).data.data_timeout)


_MAIN = sys.modules["__main__"]  # a rank that starts loader processes replaces it for a moment
OF_EACH_HOST = {"data_dir", "recipe", "workers"}  # may differ between ranks


def same_everywhere(config: Config | None) -> dict[str, str]:
    """Return the versions and flags that must be equal on all ranks."""
    found = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # not a TorchVersion, which ranks do not send to each other
        "torch": str(torch.__version__),
        "Horovod": metadata.version("horovod"),
        "hvd_train": f"{__version__} ({digest_of_code()})",
    }
    if config is not None:
        settings = {
            name: value for name, value in config.settings().items() if name not in OF_EACH_HOST
        }
        found |= {flag(name): str(value) for name, value in settings.items()}
    return found


def trained_parts(
    target: Path,
    place: Place,
    own: Own = NOTHING,
    *,
    trust: bool = False,
    split: str | None = None,
    files: Sequence[Path] = (),
    **changes: Any,
) -> tuple[Config, Parts]:
    """Return the config of a run, checkpoint or model-best.pt, and its parts
    with the trained weights.

    `changes` are other settings, if they are not None. The validation set is the `split`, or holds
    these image `files`. Raises UsageError if the target cannot be used or names code that is not
    trusted.
    """
    config, trained, data = read_target(target)
    changes = {name: value for name, value in changes.items() if value is not None}
    config = config.replace(**changes)
    seed_all(config.seed)  # as in training
    settings = config.settings()
    named = {
        kind: str(settings[kind])
        for kind, value in vars(own).items()
        if value is None and kind not in changes
    }
    if unknown := [kind for kind, name in named.items() if name == OWN]:
        advice = f"call hvd_train.evaluate(run, {unknown[0]}=...) from there"
        raise UsageError(
            f"{target} was trained with a {unknown[0]} that only its script knows: {advice}"
        )
    if not trust:
        plugin.check_trusted(str(target), named)
        config = config.replace(download=False)
    check_names(config, own)
    if "data_dir" in changes and config.data.data in ("digits", "synthetic"):
        raise UsageError(
            f"--data-dir: {config.data.data} reads no files; for class folders add --data folder"
        )
    if files:
        if config.model.task != CLASSIFICATION:
            raise UsageError(
                f"{target} is of the task {config.model.task}; only classes of images are predicted"
            )
        own = dataclasses.replace(
            own, data=lambda of: sources.of_files(of, files, identity.classes(target, data))
        )
    parts = build(config, place, own, split)
    is_same = (
        place.rank == 0
        and split in (None, "val")
        and not files
        and not changes.keys() & {"data", "data_dir"}
    )
    found = identity.differences(parts.identity, data)
    if "classes" in found:
        raise UsageError(
            f"{target}: {found['classes']}; name the class folders as they were, or train again"
        )
    if "validation" in found and is_same:
        console.say(f"{target}: {found['validation']}, so the scores differ from training")
    state.check_same_shapes(parts.model, trained)
    weights.load(trained, parts.model)
    return config, parts


def read_target(target: Path) -> tuple[Config, dict[str, torch.Tensor], Identity | None]:
    """Return config, (best) weights and data of a run folder, a checkpoint or a
    .pt file of a run folder.

    Raises UsageError.
    """
    if not target.exists():
        raise UsageError(f"{target}: no such run folder, checkpoint or weights")
    if target.is_dir() or target.suffix == ".pt":
        folder = target if target.is_dir() else target.parent
        if target != folder and not (folder / run_folder.CONFIG).exists():
            raise UsageError(
                f"{target}: the {run_folder.CONFIG} of its run must be next to "
                "it: name the run folder"
            )
        config = config_file.load(folder / run_folder.CONFIG)
        weights_of = (
            [folder / checkpoint.BEST, folder / checkpoint.FINAL] if target.is_dir() else [target]
        )
        if (path := next(filter(Path.exists, weights_of), None)) is None:
            raise UsageError(
                f"{target} has no {checkpoint.BEST} yet: it was stopped before its first evaluation"
            )
        try:
            text = (
                plain_file.read_bytes(folder / run_folder.DATA)
                if (folder / run_folder.DATA).exists()
                else b"null"
            )
            # no file: the disk may have been full
            return config, weights.tensors_in(path), json.loads(text)
        except weights.UNREADABLE as error:
            raise UsageError(
                f"cannot read the weights {path}: {weights.why_unreadable(error)}"
            ) from None
    snapshot = checkpoint.read(target)
    config = config_file.from_dict(snapshot["config"], source=str(target))
    return config, state.result_in(snapshot), snapshot["data"]


OWN = "custom"  # the name in the config of a function that cannot be imported


def reference(value: object) -> str:
    """Return `module:function` for a function that can be imported again, else OWN."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "")
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    return (
        f"{module}:{name}"
        if module and name and f"{module}{name}".replace(".", "").isidentifier()
        else OWN
    )


def of_script(config: Config) -> Config:
    """Return the config with the script's name as recipe, if it has none: one script
    never continues another's run.
    """
    return config.replace(recipe=_script()) if config.recipe == Config.recipe else config


def _script() -> str:
    """Return the path of the script as typed, with dots, or its module; "unnamed" in
    a notebook or `python -c`.

    A path below the working directory counts from there: other hosts may have it elsewhere.
    """
    file = getattr(_MAIN, "__file__", None)
    if file is None:
        return "unnamed"
    spec = _MAIN.__spec__
    # else a profiler or debugger, started by -m, runs the script
    if spec is not None and sys.argv[0] == file:
        return spec.name
    path = Path(os.path.normpath(sys.argv[0])).with_suffix("")
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    name = ".".join(part for part in path.parts if part not in ("/", ".."))
    return re.sub(r"[^\w.-]", "_", name)[-100:]
