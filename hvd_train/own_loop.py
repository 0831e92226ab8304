"""A loop of one's own, with the promises of `train`: `session` opens it, and a Session yields its steps."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train import console, goals, loop, run
from hvd_train.config import Config
from hvd_train.config_file import typed
from hvd_train.data.batches import Loader
from hvd_train.data.dataset import DataSet, Source
from hvd_train.data.loader import open_loader
from hvd_train.data.own_data import WholeBatches, whole_items
from hvd_train.data.prepare import AsTheyAre
from hvd_train.data.trees import Tree
from hvd_train.errors import UsageError
from hvd_train.launch import last_word, launcher
from hvd_train.launch.error_report import exit_for, say_once
from hvd_train.network.device import autocast, choose_device
from hvd_train.network.own_optimizer import LR_RATIO
from hvd_train.network.several import Several, by_name, parameters_of
from hvd_train.parts import Parts, loader_processes
from hvd_train.plugin import OWN
from hvd_train.progress.figures import Figure, mean
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result
from hvd_train.settings.batch import BatchConfig
from hvd_train.settings.run import RunConfig
from hvd_train.settings.schedule import ScheduleConfig
from hvd_train.step import Step, loss_of
from hvd_train.tasks.meter import Meter, Row
from hvd_train.tasks.task import Task
from hvd_train.training import Left, Training
from hvd_train.validate import Scores
from hvd_train.world.world import Place, World

Score = Callable[[nn.Module, Tree], Mapping[str, Tensor]]
"""Returns by name the loss and the measures of each sample, [n], that the model has for the items of n samples."""
_SETTINGS = {
    *("recipe", "seed", "workers", "workers_per_host", "repeated_augmentation", "average_buffers"),
    *("lr_scaling", "lr_base_batch", "reduction", "gradient_predivide_factor", "fusion_groups", "clip_norm"),
    *("ema_decay", "precision", "compression", "max_skipped_steps"),
    *(field.name for group in (BatchConfig, ScheduleConfig, RunConfig) for field in fields(group)),
} - {"best_by", "eval_epochs", "recheck_steps"}
"""The settings that mean something where model, data and optimizer are the program's."""
_DEFAULTS: dict[str, Any] = {"batch_size": None, "schedule": "constant", "shared_weights": "off"}


def session(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    dataset: Any,
    *,
    validation: Any = None,
    epochs: int = 10,
    measures: Sequence[str | Figure] = (),
    best: str = "loss",
    collate: Callable[[list[Any]], Any] | None = None,
    world: World | None = None,
    **settings: Any,
) -> Session:
    """Return a context in which a loop of one's own trains as `train` does, on the ranks that the launcher has started.

    `model` and `optimizer` are those of a program for one process; several of them, as of a GAN, are given by name, and
    each optimizer has its turn in a step (`step.slots(name)`, `step.finish(name)`). `dataset` and `validation` are
    map-style data sets, or trees of tensors whose first dimension are the rows; `collate` makes a batch of items where
    torch's `default_collate` does not. `measures` name what is measured beside the loss, of which `best` decides which
    weights are the best ones: a `hvd_train.mean("top1", better="higher")`, say. The `settings` are those of `Config` by
    their names, as in `batch_size=32` (of each worker), `output_dir`, `clip_norm` or `precision`. The learning rate is
    that of the optimizer, constant unless `schedule` says otherwise; `recipe` names the run folder (default: the
    program's name). What cannot be raises UsageError when the context is entered.
    """
    figures = tuple(mean(measure) if isinstance(measure, str) else measure for measure in measures)
    if isinstance(model, Mapping):
        model = nn.ModuleDict(dict(model))
    own = OwnLoop(model, optimizer, dataset, validation, figures, best, collate)
    return Session(own, {"epochs": epochs, **settings}, world)


@dataclass(frozen=True)
class OwnLoop:
    """What a program with a loop of its own has brought."""

    model: nn.Module
    optimizer: Optimizer | Mapping[str, Optimizer]
    dataset: Any
    validation: Any
    figures: tuple[Figure, ...]
    best: str
    collate: Callable[[list[Any]], Any] | None

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; a single one has the empty name. Raises UsageError for what is none of torch."""
        named = dict(self.optimizer) if isinstance(self.optimizer, Mapping) else {"": self.optimizer}
        if not named:
            raise UsageError("session: there is no optimizer")
        for name, optimizer in named.items():
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"session: the optimizer is a {type(optimizer).__name__}, and none of torch.optim")
            if isinstance(self.optimizer, Mapping) and not name.isidentifier():
                raise UsageError(f"session: an optimizer is called {name!r}: write it as a name in Python")
        return named

    @property
    def learning_rate(self) -> float:
        """The greatest learning rate of the optimizers' groups."""
        return max(float(group["lr"]) for one in self.optimizers.values() for group in one.param_groups)

    @property
    def all_figures(self) -> tuple[Figure, ...]:
        """What the loop measures: its own measures, and the loss in the turns of each of several optimizers."""
        losses = [loss_of(name) for name in self.optimizers if name]
        return (*self.figures, *(mean(name, name.replace("_", " ")) for name in losses))

    def config(self, settings: Mapping[str, Any]) -> Config:
        """Return the config of the run. Raises UsageError for settings that there are not, or that cannot be."""
        for name in settings.keys() & Config().settings().keys() - _SETTINGS:
            why = ": the optimizer has it" if name in ("learning_rate", "momentum", "weight_decay") else ""
            raise UsageError(f"session: {name} is no setting of a session{why}")
        program = Path(sys.argv[0]).stem
        recipe = program if re.fullmatch(r"\w[\w.-]*", program) else "session"
        batch = {} if "global_batch_size" in settings else {"batch_size": 32}
        own = {"model": OWN, "data": OWN, "task": OWN, "learning_rate": self.learning_rate}
        return Config(recipe=recipe).replace(**{**_DEFAULTS, **batch, **own, **typed(settings, "session")})

    def task(self) -> Task:
        """Return the task whose figures the loop measures. Raises UsageError for figures that no run could have."""
        names = [figure.name for figure in self.all_figures]
        return Task(
            loss=lambda outputs, _: outputs["loss"],
            measures=lambda outputs, _: {name: outputs[name] for name in names},
            figures=self.all_figures,
            best=self.best,
        )

    def build(self, config: Config, place: Place) -> tuple[Parts, Optimizer]:
        """Return the parts of this rank, and the optimizer. Raises UsageError for what cannot serve."""
        task, device = self.task(), choose_device(config, place)
        goals.check(config.schedule, task, can_evaluate=self.validation is not None)
        row = Row({figure.name: () for figure in self.all_figures})
        sources = [
            None if data is None else whole_items(f"the {name}", data)
            for name, data in (("training set", self.dataset), ("validation set", self.validation))
        ]
        train_loader, val_loader = (
            None if source is None else self.open(source, config, place, device) for source in sources
        )
        train_set = sources[0]
        assert train_set is not None
        assert train_loader is not None
        greatest, optimizers = self.learning_rate, self.optimizers
        known = {id(parameter) for parameter in self.model.parameters()}
        if any(id(p) not in known for optimizer in optimizers.values() for p in parameters_of(optimizer)):
            raise UsageError("session: an optimizer has parameters that are not of the model: give all models, by name")
        for group in (group for optimizer in optimizers.values() for group in optimizer.param_groups):
            group[LR_RATIO] = float(group["lr"]) / greatest
        parts = Parts(
            device,
            DataSet(train_set, sources[1]),
            self.model.to(device),
            train_loader,
            val_loader,
            None,
            Meter(task, row, row, {}),
            ((), ()),
            "samples",
            updated_alone=False,
        )
        train_loader.start()
        return parts, optimizers[""] if "" in optimizers else Several(optimizers)

    def open(self, source: Source, config: Config, place: Place, device: torch.device) -> Loader:
        """Return a loader of a data set of whole items."""
        num_workers = loader_processes(config.data, place)
        collate = None if self.collate is None else WholeBatches(self.collate)
        return open_loader(source, AsTheyAre(), device, config.seed, num_workers, collate)


class Session:
    """A training whose steps a program takes itself: `for step in session:`, inside `with session:`."""

    def __init__(self, own: OwnLoop, settings: Mapping[str, Any], world: World | None = None) -> None:
        self._own, self._settings, self._given_world = own, settings, world
        self._open = ExitStack()
        self._loaders: dict[int, Loader] = {}
        self._step: Step | None = None

    def __enter__(self) -> Session:
        """Meet the other ranks. Raises UsageError for what cannot give a run."""
        console.outlive()
        try:
            self._begin()
        except Exception as error:
            self._open.close()
            exit_for(error)
            raise
        return self

    def _begin(self) -> None:
        config = self._config = run.prepared(self._own.config(self._settings))
        stop = self._open.enter_context(StopSignal(hangup=not launcher.elastic(os.environ)))
        world = self._world = self._open.enter_context(closing(self._given_world or run.connect(config)))
        self._training = self._open.enter_context(
            closing(Training(config, world, stop, lambda: self._own.build(config, world.place)))
        )
        self._steps = self._training.steps()

    def __iter__(self) -> Session:
        return self

    def __next__(self) -> Step:
        """Return the next step, of a world that is there: where ranks came or went, another one is formed first."""
        self._step = next(self._steps)
        of_training = by_name(self._training.job.state.optimizer)
        for name, own in self._own.optimizers.items():  # whoever looks at theirs sees what a checkpoint has brought
            own.param_groups, own.state = of_training[name].param_groups, of_training[name].state
        return self._step

    @property
    def result(self) -> Result:
        """How the training ended. Raises UsageError before its end."""
        if self._training.result is None:
            raise UsageError("session.result is there after the last step")
        return self._training.result

    @property
    def device(self) -> torch.device:
        """The device of the model, on which slots have their tensors."""
        return self._training.parts.device

    @property
    def place(self) -> Place:
        """Where this process stands among the ranks. What it computes must not depend on that."""
        return self._world.place

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which forward passes have the arithmetic of the session's `precision`."""
        return autocast(self._config.precision.precision, self.device)

    def say(self, text: str) -> None:
        """Print a line once for all ranks, above the progress. All of them may call it."""
        if self._step is None:
            say_once(text)
        else:
            self._training.job.output.journal.event("note", text)

    def evaluate(self, score: Score, dataset: Any = None) -> Scores:
        """Return the scores over all samples of the validation set, or of another one, the same on every rank.

        `score(model, items)` returns the loss and the measures of each sample, [n], by name; the model is in evaluation
        mode, and no gradient is kept. Each sample counts once. Those of the validation set belong to the epoch where
        `step.ends_epoch`. Raises UsageError where the scores have other names or there is no such set, and RankLost.
        """
        if not (self._step is not None and self._step.is_entered) and self._training.result is None:
            raise UsageError("session.evaluate is called inside `with step:`, or after the last step")
        job = self._training.job
        loader = job.parts.val_loader if dataset is None else self._loader(dataset)
        if loader is None:
            raise UsageError("session.evaluate: there is no validation set; give one: session(..., validation=...)")
        names = {"loss", *(figure.name for figure in self._own.figures)}

        def scored(model: nn.Module, items: Tree) -> Mapping[str, Tensor]:
            found = score(model, items)
            if not isinstance(found, Mapping) or {*found} != names:
                got = ", ".join(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
                raise UsageError(f"the scores must be a dict of {', '.join(sorted(names))}, [n] each; got {got}")
            # There are no turns here, and no losses of them.
            lacking = torch.full_like(found["loss"], torch.nan, dtype=torch.float32)
            return {**{figure.name: lacking for figure in self._own.all_figures}, **found}

        meter = job.parts.meter
        by_score = Meter(replace(meter.task, forward=scored), meter.training, meter.evaluation, {})
        scores = loop.validate(job, loader, job.state.result, by_score)
        if dataset is None and self._step is not None and self._step.ends_epoch:
            self._step.scores = scores
        return scores

    def _loader(self, dataset: Any) -> Loader:
        """Return the loader of a data set that is evaluated, which is opened once."""
        if id(dataset) not in self._loaders:
            source = whole_items("the data set to evaluate", dataset)
            loader = self._own.open(source, self._config, self.place, self.device)
            self._loaders[id(dataset)] = self._open.enter_context(closing(loader))
        return self._loaders[id(dataset)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit what is done, and end the part of this rank."""
        if error is None and self._training.result is None and self._step is not None:
            error = Left()
        with self._open:
            try:
                if error is not None:
                    self._leave(error)
            except Exception as raised:
                exit_for(raised)
                raise
        self._exit_if_stopped()

    def _leave(self, error: BaseException) -> None:
        """Have the training end by an error of the program, as if it were its own; Left ends it with a commit."""
        try:
            self._steps.throw(error)
        except StopIteration:
            return
        self._steps.close()
        raise error

    def _exit_if_stopped(self) -> None:
        """Exit where a signal or a time limit has stopped the training: what comes next needs a whole one."""
        result = self._training.result
        if result is not None and not result.finished and not self._training.was_left:
            code = 128 + result.stopped_by if result.stopped_by else os.EX_TEMPFAIL
            with last_word.exit_code_told(os.environ):
                raise SystemExit(code)
