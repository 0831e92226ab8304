"""A training whose loop is the user's own."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate
from typing_extensions import Self

from hvd_train.config import GROUPS, Config, config_of
from hvd_train.console import say
from hvd_train.data import identity
from hvd_train.data.loader import Collate, Loader, open_loader
from hvd_train.data.own_order import OwnOrder
from hvd_train.data.per_sample import ARGUMENTS
from hvd_train.data.plain import number
from hvd_train.data.random_numbers import seed_all, unchanged_numbers
from hvd_train.data.sources import check_apart, check_map_style
from hvd_train.errors import UsageError, first_few, flag
from hvd_train.flags import settings_parser
from hvd_train.history import START
from hvd_train.launch import launcher
from hvd_train.launch.exit_report import report_in_one_line
from hvd_train.loops import Epoch, Loops, Step
from hvd_train.network import buffers, models, optim
from hvd_train.network.digest import digest_of_module
from hvd_train.parts import loader_processes, of_a_loop
from hvd_train.progress.metrics import FACTS
from hvd_train.progress.order import in_order
from hvd_train.result import Result
from hvd_train.run import OWN, check, of_script, opened
from hvd_train.state import values_of
from hvd_train.tasks.task import Function, Goal, Measuring, Scores, Task
from hvd_train.world.world import World

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
_EFFECTIVE = {
    field.name for group in ("batch", "precision", "run") for field in fields(GROUPS[group])
}
_EFFECTIVE |= {
    "recipe",
    "seed",
    "epochs",
    "patience",
    "workers",
    "sync_batch_norm",
    "clip_norm",
    "ema_decay",
}
_EFFECTIVE -= {"compile", "eval_epochs"}
_INSTEAD = {
    "compile": "call model.compile() before the session",
    "lr_scaling": "set the learning rate yourself, from session.global_batch or step.size",
}


class Session:
    """A training with a loop of your own: iterate over epochs, steps and micro-batches.

    >>> with hvd_train.Session(model, optimizer, data, epochs=10, batch_size=32) as session:
    ...     for epoch in session.epochs():
    ...         for step in epoch:
    ...             for micro in step:
    ...                 images, labels = micro.batch
    ...                 micro.backward(F.cross_entropy(model(images), labels, reduction="none"))

    When the loop over a step's micro-batches has ended, the weights are new on all ranks. If a rank
    is lost, the micro-batches of that step come again; all other code runs once. The end of the
    block writes the final files.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        data: Any,
        *,
        collate: Collate = default_collate,
        order: OwnOrder | None = None,
        weights: Any = None,
        lengths: Any = None,
        config: Config | None = None,
        name: str = "",
        world: World | None = None,
        **settings: Any,
    ) -> None:
        """Move the model to this rank's device; model and optimizer stay yours, without a wrapper.

        Both may be several, by name: `evaluate` and files of weights then have an nn.ModuleDict of
        the models, and each optimizer has updates of its own (`Step.update`).

        `data` has a length and an item by number; `collate` makes a batch of a list of items.
        `order(seed, epoch, num_samples)` returns the sample numbers of an epoch (from 0), as
        `hvd_train.in_order` does; by default they are shuffled. With `weights`, a number for each
        sample, samples are drawn in proportion to them; with `lengths`, samples of similar length
        come into a micro-batch. `settings` are settings of a run
        that act in a loop of one's own, in addition to `config`; `world` is for tests. Of several
        sessions in a program each has a `name`, which is its folder in the run folder. Raises
        UsageError for other settings, for a parameter that requires a gradient and is in no
        optimizer or in two, and for data without length or items.
        """
        config = config_of(config).replace(**settings)
        if order is in_order:
            config = config.replace(order="in-order")
            order = None
        if order is not None and not callable(order):
            raise UsageError(f"order={order!r}: give a function, such as hvd_train.in_order")
        per_sample = None
        for setting, values in (("sample_weights", weights), ("length_buckets", lengths)):
            if values is None:
                continue
            if config.settings()[setting] is not None:
                raise UsageError(f"{flag(setting)} and {ARGUMENTS[setting]}=...: leave one out")
            config = config.replace(**{setting: OWN})
            per_sample = values
        if order is not None and (config.batch.sample_weights or config.batch.length_buckets):
            raise UsageError("order=... does not go with weights or lengths: leave one out")
        names = config.given | settings.keys()
        default = Config().settings()
        values = config.settings()
        if idle := [
            name
            for name in values
            if name not in _EFFECTIVE and (name in names or values[name] != default[name])
        ]:
            instead = _INSTEAD.get(idle[0], "leave it out")
            raise UsageError(
                f"{idle[0]}={values[idle[0]]!r} has no effect in a loop of your own: {instead}"
            )
        for given, check_kind in ((model, models.check_own), (optimizer, optim.check_own)):
            for thing in given.values() if isinstance(given, Mapping) else [given]:
                check_kind(thing)
        config = of_script(config.replace(model=OWN, data=OWN, task=OWN))
        check(config, name)
        self._collate = collate
        self._constants = 0
        self._loaders = dict[str, _Evaluated]()
        optimizers = {"": optimizer} if isinstance(optimizer, Optimizer) else _named(optimizer)
        network = model if isinstance(model, nn.Module) else nn.ModuleDict(_named(model))
        with ExitStack() as stack:
            build = lambda world: of_a_loop(  # noqa: E731
                config, world, network, optimizers, data, collate, order, per_sample
            )
            self._ranks, stop = stack.enter_context(opened(config, name, world, build))
            self._open = stack.pop_all()
        self._open.callback(self._close_loaders)
        networks = [model] if isinstance(model, nn.Module) else [*network.children()]
        self._loops = Loops(self._ranks, stop, networks, is_users=True)
        for each in optimizers.values():
            replaced = {
                "step": optim.Closed,
                "zero_grad": optim.Closed,
                "add_param_group": optim.AddsOnce,
            }
            for name, kind in replaced.items():
                self._open.callback(_restore, each, name, vars(each).get(name))
                setattr(each, name, kind(getattr(each, name)))
            # else schedulers warn of a missing step
            each._opt_called = True  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._loops.__exit__(kind, error, trace)
        finally:
            self._open.__exit__(*sys.exc_info())

    @property
    def result(self) -> Result:
        """How the training ended, after the block."""
        return self._loops.result

    @property
    def device(self) -> torch.device:
        """The device of this rank, on which the batches are."""
        return self._ranks.parts.device

    @property
    def rank(self) -> int:
        """The number of this process among the ranks; for display only, since it may change."""
        return self._ranks.world.place.rank

    @property
    def size(self) -> int:
        """The number of ranks; for display only, since it may change."""
        return self._ranks.world.place.size

    @property
    def global_batch(self) -> int:
        """The samples of a step on all ranks; the last step of an epoch may have fewer."""
        return self._loops.joined().layout.global_batch

    @property
    def run_dir(self) -> Path | None:
        """The run folder; None on ranks that do not write."""
        return self._ranks.output.path

    def register(self, **state: Any) -> SimpleNamespace:
        """Let state of yours survive: what has a state_dict (schedulers, modules) and plain
        values; return it by name.

        A plain value is changed by setting an attribute of what this returns. Raises UsageError for
        anything else, and after the first epoch has begun.
        """
        if self._ranks.history.at.part != START:
            raise UsageError("register state before the loop over epochs")
        own = self._loops.own
        vars(own).update(state)
        values_of(own)  # raises UsageError
        return own

    def evaluate(
        self, data: Any, measure: Function, *, name: str = "val", collate: Collate | None = None
    ) -> Scores:
        """Return the scores of `measure(model, batch)` over a set: each sample counts
        once, for any number of ranks.

        The model (its moving average, if one is kept) is in evaluation mode meanwhile. Scores are
        written down as NAME_FIGURE. `collate` makes a batch of a list of items, by default the
        session's. Raises UsageError for data without length or items, for measures that are no
        measures, if the ranks' data differ, and for a second evaluation of one name at one place of
        the program.
        """
        of_set = self._evaluated(name, data, collate or self._collate)
        task = Task(measure, best="")
        measuring = Measuring(measure, trains=False)
        facts = identity.facts_of_items(name, of_set.digest)
        return self._loops.evaluate(task, measuring, of_set.loader, name, facts)

    def constant(self, module: M) -> M:
        """Move a module that is not trained, such as a teacher, to this
        rank's device, and return it.

        It is in evaluation mode and its parameters have no gradient. Checkpoints do not have it. If
        it differs between ranks, all raise UsageError. Raises UsageError after the first loop or
        evaluation has begun.
        """
        if self._ranks.has_joined:
            raise UsageError("call session.constant before the first loop or evaluation")
        self._constants += 1
        module.to(self.device).eval().requires_grad_(requires_grad=False)
        self._ranks.world.compare({f"constant module {self._constants}": digest_of_module(module)})
        return module

    def before_update(self, function: Callable[[list[nn.Parameter]], object]) -> None:
        """Call `function(parameters)` before each update: to clip gradients by value,
        to add noise, and the like.

        It gets the parameters that have a gradient, which is the mean over all samples of the step
        then, on all ranks. It may change or remove it. torch draws the same random numbers on all
        ranks. `--clip-norm` acts afterwards. A step whose loss or gradient is not finite is skipped
        before.
        """
        self._loops.call_before_updates(function)

    @contextmanager
    def aside(self) -> Iterator[bool]:
        """Inside this block, on all ranks, use the models for pictures or the like; give
        whether this rank writes.

        There are no gradients. Afterwards modes, buffers and random numbers are as before.
        """
        model = self._ranks.parts.model
        device = self.device
        devices = [device] if device.type == "cuda" else []
        self._loops.look_for_writes()
        with unchanged_numbers(devices), torch.no_grad(), buffers.unchanged(model):
            yield self.run_dir is not None
        self._loops.writes.note()

    def log(self, **values: float) -> None:
        """Write numbers by name, with the number of steps done, into metrics.jsonl and
        TensorBoard, on one rank.
        """
        if wrong := FACTS & values.keys():
            raise UsageError(f"session.log({first_few(sorted(wrong))}=...): take another name")
        figures = {
            name: number(value, f"session.log({name}=...)") for name, value in values.items()
        }
        state = self._loops.joined()
        self._ranks.output.journal.log(figures, state.progress.step)

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left; the first one may have begun.

        They end after the last epoch, after `stop`, or as `--max-time`, `--patience` or `--target`
        say. Raises: Stopped: after a commit, if the training was asked to stop; RankLost: if no
        other world can form; Diverged: if many steps in a row have a loss or a gradient that is not
        finite.
        """
        return self._loops.epochs()

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are left, of all epochs. Raises as `epochs` does."""
        for epoch in self.epochs():
            yield from epoch

    def keep_best(self, value: float, *, higher: bool = True) -> bool:
        """Keep the weights as the best ones, if `value` is better than
        before; return whether it is.
        """
        best = number(value, "session.keep_best(...)")
        return self._loops.keep_best({**self._loops.figures, "best": best}, Goal("best", higher))

    def stop(self, why: str) -> None:
        """End the loops after this step or epoch. All ranks call it alike."""
        self._loops.stop(why)

    def _evaluated(self, name: str, data: Any, collate: Collate) -> _Evaluated:
        """Return the loader of a set to evaluate: the last one of this name, if set,
        length and `collate` are equal.
        """
        known = self._loaders.get(name)
        if known is not None:
            if (
                known.data is data
                and known.collate is collate
                and known.loader.num_samples == len(data)
            ):
                return known
            del self._loaders[name]
            known.loader.close()
        check_map_style("the set to evaluate", data)
        config = self._ranks.config
        parts = self._ranks.parts
        check_apart(parts.data.train, data)
        workers = loader_processes(config.data, self._ranks.world.place)
        loader = open_loader(data, None, parts.device, config.seed, workers, collate)
        with unchanged_numbers():  # torch's DataLoader draws one, which programs would notice
            digest = loader.start()
        self._loaders[name] = found = _Evaluated(data, collate, loader, digest)
        return found

    def _close_loaders(self) -> None:
        for each in self._loaders.values():
            each.loader.close()


@dataclass(frozen=True)
class _Evaluated:
    """A set to evaluate, and its loader."""

    data: Any
    collate: Collate
    loader: Loader
    digest: str


def _named(things: Mapping[str, T]) -> dict[str, T]:
    """Return models or optimizers by name.

    Raises UsageError for a name that files could not have.
    """
    if not things:
        raise UsageError("name a model and an optimizer: the session has got none")
    if wrong := [
        name for name in things if not name.isidentifier() or hasattr(nn.ModuleDict, name)
    ]:
        raise UsageError(
            f"{wrong[0]!r} cannot be the name of a model or an optimizer: take another one"
        )
    return dict(things)


def _restore(optimizer: Optimizer, name: str, own: Any) -> None:
    """Give the optimizer back its method: its own one, if it had any, else that of its class."""
    if own is None:
        delattr(optimizer, name)
    else:
        setattr(optimizer, name, own)


def parse_args(parser: ArgumentParser | None = None, **defaults: Any) -> tuple[Namespace, Config]:
    """Return the arguments of a script: its own, which `parser` knows, and the config
    of a run from all others.

    `defaults` are settings of the run. A number of `parser` with the name of a setting that acts in
    a loop of one's own, such as `--epochs`, gives the setting its value, too. Seeds torch, numpy
    and `random` by `--seed`, for the initial weights and all that the script draws. A wrong
    argument ends the script with one line and exit code 2.
    """
    own, rest = Namespace(), sys.argv[1:]
    if parser is not None:
        parser.epilog = parser.epilog or (
            "Other flags belong to a run: `hvd-train train --help` lists them."
        )
        parser.allow_abbrev = False  # else --epochs could be short for a flag of the script
        own, rest = parser.parse_known_args()
    report_in_one_line()
    shared = {
        name: value
        for name, value in vars(own).items()
        if name in _EFFECTIVE and type(value) in (int, float)
    }
    if shared and launcher.prints():
        values = ", ".join(f"{name}={value!r}" for name, value in shared.items())
        say(f"flags of the script with the name of a setting set it, too: {values}")
    config = Config().replace(**{**defaults, **shared})
    typed = vars(settings_parser(f"python {sys.argv[0]}", config).read(rest))
    config = config.replace(**typed)
    seed_all(config.seed)
    return own, replace(config, given=frozenset((*defaults, *shared, *typed)))
