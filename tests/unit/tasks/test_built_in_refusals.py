"""Tasks that cannot be trained: one line says what is wrong, before anything starts, or on all ranks in its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_train import Figure, Task, cli, mean, train
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.errors import RankLost, UsageError
from hvd_train.world.world import World
from tests.support.own_tasks import HERE, errors, line, rows
from tests.support.runs import small_config
from tests.support.task_runs import Items
from tests.support.worlds import run_ranks


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def begun(task: Task, data: Callable[..., Any] = rows, world: World | None = None, **changes: Any) -> None:
    train(small_config(epochs=1, global_batch_size=8, **changes), model=line, data=data, task=task, world=world)


def measuring(**measures: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Mapping[str, Tensor]]:
    return lambda outputs, targets: {name: measure(outputs) for name, measure in measures.items()}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a mean": (
        {"loss": lambda outputs, targets: F.mse_loss(outputs, targets)},
        r"the loss of the task is of shape \[\]; return one for each sample, \[2\]; leave out the mean over samples, "
        r"as with reduction='none'",
    ),
    "a loss in evaluations that is a mean": (
        {"evaluated_loss": lambda outputs, targets: F.mse_loss(outputs, targets)},
        r"the loss of the task is of shape \[\]; return one for each sample, \[2\]; leave out the mean.*",
    ),
    "too many losses": (
        {"loss": lambda outputs, targets: loss(outputs, targets).repeat(2)},
        r"the loss of the task is of shape \[4\]; return one for each sample, \[2\]",
    ),
    "losses of all pairs": (
        {"loss": lambda outputs, targets: loss(outputs.unsqueeze(1), targets)},
        r"the loss of the task is of shape \[2, 2\]; return one for each sample, \[2\]",
    ),
    "a number": (
        {"loss": lambda outputs, targets: 1.0},
        r"the loss of the task is of float; return one for each sample, \[2\].*",
    ),
    "a measure that is a mean": (
        {"measures": measuring(size=torch.mean)},
        r"the measure size of the task is of shape \[\]; return one for each sample, \[2\]",
    ),
    "a measure of one row": (
        {"evaluated_measures": measuring(size=lambda outputs: outputs[:1])},
        r"the measure size of the task is of shape \[1\]; return one for each sample, \[2\]",
    ),
    "a measure that is no tensor": (
        {"measures": measuring(size=lambda outputs: [1.0, 2.0])},
        "the measures of the task must be a dict of tensors, by name",
    ),
    "no dict": (
        {"measures": lambda outputs, targets: outputs},
        "the measures of the task must be a dict of tensors, by name",
    ),
    "a measure called loss": (
        {"measures": measuring(loss=torch.abs)},
        "a measure of the task is called loss, which is the trainer's: choose another name",
    ),
    "a measure called count": (
        {"stored": measuring(count=torch.abs)},
        "a measure of the task is called count, which is the trainer's: choose another name",
    ),
    "a measure twice": (
        {"measures": measuring(size=torch.abs), "stored": measuring(size=torch.abs)},
        "the task measures size twice: each name stands for one measure",
    ),
    "a figure of nothing": (
        {"measures": measuring(size=torch.abs), "figures": (mean("bias"),)},
        "the figure bias of the task needs 'bias', which is not among what is measured in training: loss, size",
    ),
    "a figure of what evaluations alone measure": (
        {"evaluated_measures": measuring(size=torch.abs), "figures": (mean("size"),)},
        "the figure size of the task needs 'size', which is not among what is measured in training: loss",
    ),
    "figures of each class of nothing": (
        {"stored": measuring(size=torch.abs), "per_class": lambda sums, count: {"a": float(sums["right"])}},
        "the task's figure of each class needs 'right', which is not among what is measured in evaluations: loss, size",
    ),
    "an error of its own": (
        {"loss": lambda outputs, targets: targets.nothing},
        r"the task cannot take what model \S+ returns \(shape \(2,\)\) with targets shape \(2,\): \w+Error: .*",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_task_is_refused_before_anything_starts(name: str) -> None:
    """In one line, and there is no run folder yet."""
    wrong, words = WRONG[name]
    with pytest.raises(UsageError, match=rf"^{words}$"):
        begun(Task(**{"loss": loss, **wrong}))
    assert not Path("run").exists()


ORDERLESS = mean("size")
NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "no order": (
        {"figures": (ORDERLESS,), "best": "size"},
        "size has no order: say which values are better; those that can decide which weights are the best: loss$",
    ),
    "unknown": ({"best": "size"}, "size is no figure of the task; those that can decide .* are the best: loss$"),
    "epoch": ({"figures": (mean("epoch"),)}, "a figure of the task is called 'epoch', which records use already"),
    "val_": ({"figures": (mean("val_x"),)}, "a figure of the task is called 'val_x', which records use already"),
    "no name": ({"figures": (mean("mean error"),)}, "a figure of the task is called 'mean error': write it as a name"),
    "loss": ({"figures": (mean("loss"),)}, "two figures of the task are called 'loss': each needs a name of its own"),
    "twice": ({"figures": (mean("a"), mean("a"))}, "two figures of the task are called 'a'"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_cannot_be_are_refused_when_the_task_is_made(name: str) -> None:
    """A task cannot be made with them."""
    wrong, words = NAMES[name]
    with pytest.raises(UsageError, match=words):
        Task(loss=loss, **wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"best_by": "top1"}, "--best-by top1: top1 is no figure of the task; .* are the best: loss, median"),
        ({"best_by": "bias"}, "--best-by bias: bias has no order"),
        ({"target": "top1=0.5"}, "--target top1=0.5: top1 is no figure of the task"),
        ({"target": "bias=0"}, "--target bias=0: bias has no order"),
        ({"target_accuracy": 0.9}, "--target-accuracy: top1 is no figure of the task"),
        ({"label_smoothing": 0.1}, "--label-smoothing is for classes, not for --task custom: type --label-smoothing 0"),
        ({"task_args": ("scale=2",)}, "--task-args are for a function that returns a task"),
        ({"mixup": 0.5}, "--mixup is for tasks whose targets are class numbers; make such changes in the data set"),
    ],
)
def test_settings_that_do_not_go_with_the_task_are_refused(changes: dict[str, Any], words: str) -> None:
    """Each names its flag, and what there is instead."""
    with pytest.raises(UsageError, match=words):
        begun(errors(DataSet((), None)), **changes)
    assert not Path("run").exists()


def test_numbers_that_would_be_broadcast_are_refused() -> None:
    """Regression takes [n] and [n, 1] for each other, and nothing else of another shape."""

    def shaped(make: Callable[[Tensor], Tensor], targets: Tensor) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(()))

            def forward(self, inputs: Tensor) -> Tensor:
                return make(inputs) * self.weight

        data = TensorDataset(torch.ones(8, 3), targets)
        config = small_config(epochs=1, global_batch_size=8, task="regression")
        train(config, model=lambda outputs: Model(), data=lambda _: (data, None))

    shaped(lambda inputs: inputs[:, :1], torch.ones(8))
    shaped(lambda inputs: inputs[:, 0], torch.ones(8, 1))
    for make, targets, got in (
        (lambda inputs: inputs, torch.ones(8), r"\(2, 3\)"),
        (lambda inputs: inputs[:, 0], torch.ones(8, 3), r"\(2,\)"),
        (lambda inputs: inputs.mean(), torch.ones(8), r"\(\)"),
        (lambda inputs: inputs.T, torch.ones(8, 3), r"\(3, 2\)"),
    ):
        with pytest.raises(UsageError, match=rf"returns shape {got}; it must return numbers of the shape of the tar"):
            shaped(make, targets)


def test_a_built_in_task_says_that_it_cannot_take_a_tree() -> None:
    """Its targets are a tensor."""
    data = DataSet(Arrays(torch.ones(8, 3), (torch.ones(8), torch.ones(8)), 8), None)
    with pytest.raises(UsageError, match=r"the task cannot take what .* with targets \(tensor, tensor\): Attribute"):
        train(small_config(task="regression"), model=line, data=lambda _: data)


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        (
            lambda outputs, targets: {"a" if len(targets) == 2 else "b": outputs},
            r"the measures changed their names: first a, then b; give the same ones for every batch",
        ),
        (
            lambda outputs, targets: {"a": outputs.view(-1, 1).expand(-1, len(targets))},
            r"the measure a changed its shape: first \[n, 2\], then \[4, 4\] for 4 samples",
        ),
        (
            lambda outputs, targets: {"a": outputs if len(targets) == 2 else outputs.mean()},
            r"the measure a changed its shape: first \[n\], then \[\] for 4 samples",
        ),
    ],
)
def test_measures_that_change_from_batch_to_batch_end_the_training(measures: Any, words: str) -> None:
    """In the step, with both; sums of different things are never added up."""
    with pytest.raises(UsageError, match=words):
        begun(Task(loss=loss, measures=measures))


def test_losses_that_change_from_batch_to_batch_end_the_training() -> None:
    """A mean over the batch in some of them is no loss of each sample."""
    with pytest.raises(UsageError, match=r"the loss of the task is of shape \[\]; return one for each sample, \[4\]"):
        begun(Task(loss=lambda o, t: loss(o, t) if len(t) == 2 else loss(o, t).mean()))


@pytest.mark.parametrize("size", [1, 3])
def test_a_measure_that_is_not_finite_ends_the_training_on_all_ranks(size: int) -> None:
    """It is a sum over them, whoever has the sample; the steps before it are committed."""
    _, targets = rows(None)[0].tensors
    worst = float(targets.max())
    task = Task(loss=loss, measures=lambda o, t: {"far": torch.where(t == worst, torch.inf, o.detach())})

    def end(world: World) -> str:
        with pytest.raises(UsageError) as told:
            begun(task, world=world)
        return str(told.value)

    ends = run_ranks(size, end)
    assert ends == ends[:1] * size
    assert isinstance(ends[0], str)
    assert ends[0].endswith("the task's measure far is not finite")
    step = int(ends[0].removeprefix("step ").partition(":")[0])
    assert 1 <= step <= 3
    kept = [int(path.stem.rpartition("-")[2]) for path in Path("run/checkpoints").glob("*.ckpt")]
    assert max(kept, default=0) == step - 1


class Odd(Items):
    """A data set whose sample number five is another one."""

    def __init__(self, odd: Any) -> None:
        inputs, targets = rows(None)[0].tensors
        super().__init__(inputs, (targets, targets), 20, ())
        self.odd = odd

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == 5 else super().__getitem__(index)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ((torch.ones(3), [1.0, 2.0]), r"sample 5 (of the data )?is \(tensor, \[tensor, tensor\]\)"),
        ((torch.ones(3), 1.0), r"sample 5 (of the data )?is \(tensor, tensor\)"),
        ((torch.ones(3), ("text", 1)), "sample 5 of the data holds str, which is no tensor and no number"),
        ((torch.ones(3), torch.ones(()), 1), r"sample 5 of the data is no pair; return \(inputs, targets\)"),
        (None, r"sample 5 of the data is no pair; return \(inputs, targets\)"),
        ((torch.ones(4), (1.0, 2.0)), r"the items of a batch do not fit together: .*\[4\].*"),
    ],
    ids=["list", "tensor", "text", "three", "none", "size"],
)
def test_samples_that_are_built_otherwise_are_named(odd: Any, words: str) -> None:
    """With the number of the sample, in the step that has it, wherever it lies in its batch."""
    task = Task(loss=lambda outputs, targets: loss(outputs, targets[0]), outputs=1)
    for batch_size in (4, 8):
        with pytest.raises(UsageError, match=words) as told:
            begun(task, data=lambda _: (Odd(odd), None), batch_size=batch_size, output_dir=Path(f"run-{batch_size}"))
        assert "\n" not in str(told.value)


def test_text_in_the_first_sample_is_found_before_anything_starts() -> None:
    """Models take numbers."""

    class Texts(Items):
        def __getitem__(self, index: int) -> Any:
            return "text", 1.0

    inputs, targets = rows(None)[0].tensors
    with pytest.raises(UsageError, match="sample 0 of the data holds str, which is no tensor and no number"):
        begun(Task(loss=loss, outputs=1), data=lambda _: (Texts(inputs, targets, 20, ()), None))
    with pytest.raises(UsageError, match="sample 0 of the data has a target of str, which is no tensor and no number"):
        train(small_config(task="regression"), model=line, data=lambda _: ([(torch.ones(3), "text")], None))
    assert not Path("run").exists()


def test_a_rank_with_a_wrong_batch_takes_the_others_along() -> None:
    """Its own line is told; the others hear that it is gone, and no rank waits."""
    ends = []

    def end(world: World) -> None:
        own = errors(DataSet((), None))
        is_wrong = world.place.rank == 1
        task = Task(
            loss=lambda o, t: loss(o, t) if len(t) == 2 or not is_wrong else o.sum(), figures=(), measures=own.measures
        )
        try:
            begun(task, world=world)
        except (UsageError, RankLost) as error:
            ends.append((world.place.rank, type(error)))
            raise

    with pytest.raises(UsageError, match="the loss of the task is of shape"):
        run_ranks(2, end)
    assert sorted(ends, key=lambda one: one[0]) == [(0, RankLost), (1, UsageError)]


TYPED = [
    # what is typed after `train`, what the one line says
    (
        "diabetes --task classification",
        "--data diabetes has no classes: type what the task is, as in --task regression",
    ),
    ("diabetes --task segmentation", "the data have no `classes`; give their names, or --task-args classes=21"),
    ("diabetes --task language-model", "type how many tokens there are, as in --task-args vocabulary=50257"),
    ("diabetes --task regresion", "unknown task 'regresion'; did you mean 'regression'?"),
    ("diabetes --task custom", "--task custom: only the script that began this run knows its task"),
    ("diabetes --task nowhere:task", "--task nowhere:task: cannot import nowhere"),
    ("diabetes --task-args loss=cubic", "--task-args loss=cubic: it must be one of squared, absolute, huber"),
    ("diabetes --task-args los=huber", "--task-args los=...: regression has no such argument; it takes loss"),
    ("diabetes --task-args loss", "--task-args loss: it must be name=value"),
    ("digits --task-args loss=huber", "--task-args loss=...: classification has no such argument; it takes none"),
    ("diabetes --mixup 0.2", "--mixup is for tasks whose targets are class numbers"),
    ("diabetes --cutmix 1", "--cutmix is for tasks whose targets are class numbers"),
    ("digit-shapes --augment trivial", "--augment is for tasks whose targets are class numbers"),
    ("digit-shapes --task-args classes=0", "--task-args classes=0: it must be a number of classes"),
    (
        "digit-shapes --task-args classes=5",
        "the task cannot take what model segmentation-convnet returns (shape (2, 5, ",
    ),
    ("diabetes --label-smoothing 0.1", "--label-smoothing is for classes, not for --task regression"),
    ("diabetes --target top1=0.5", "--target top1=0.5: top1 is no figure of the task; those that can decide"),
    ("diabetes --target rmse", "--target rmse: write a figure and its value, as in --target miou=0.7"),
    ("diabetes --best-by accuracy", "--best-by accuracy: accuracy is no figure of the task; those that can decide"),
    ("python-docs --task-args vocabulary=many", "--task-args vocabulary=many: it must be a number of tokens"),
    ("python-docs --task-args vocabulary=50", "model small-transformer cannot take inputs shape (2, "),
    ("python-docs --sequence-length 500", "model small-transformer cannot take inputs shape (2, 500): "),
    ("python-docs --sequence-length 1000000", "--sequence-length 1000000 is longer than the text, of "),
    ("digits --task distillation", "--task distillation needs a teacher: type --task-args teacher=RUN, a run folder"),
    ("digits --task distillation --task-args teacher=resnet18", "add teacher_weights=FILE, or DEFAULT"),
    ("digits --task distillation --task-args teacher=nobody teacher_weights=t.pt", "nobody"),
    ("digits --task distillation --task-args teacher=digits-convnet teacher_weights=t.pt", "t.pt: no such file"),
    (f"diabetes --task {HERE}:errors --task-args size=2", "it cannot be called with the data and --task-args: "),
    (f"diabetes --task {HERE}:rows", f"--task {HERE}:rows: it returned tuple, not an hvd_train.Task"),
    (f"diabetes --task {HERE}:errors --task-args best=bias", "bias has no order"),
    (f"digits --task {HERE}:errors --label-smoothing 0.1", f"is for classes, not for --task {HERE}:errors"),
]


@pytest.mark.parametrize(("typed", "says"), TYPED)
def test_what_is_typed_wrong_is_told_in_one_line(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and nothing has been written."""
    assert cli.run(["train", *typed.split(), "--device", "cpu", "--epochs", "1", "--output-dir", "run"]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.startswith("hvd-train: ")
    assert told.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.slow
def test_arguments_of_distillation_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A temperature that is no number, and a weight above 1."""
    assert cli.run(["train", "digits", "--device", "cpu", "--epochs", "1", "--output-dir", "teacher"]) == 0
    capsys.readouterr()
    for wrong, says in (
        ("temperature=hot", "--task-args: distillation cannot take these: "),
        ("weight=2", "the temperature must be above 0, and the weight from 0 to 1"),
        ("temprature=2", "distillation has no such argument; it takes teacher, teacher_weights, temperature, weight"),
    ):
        typed = f"train digits --task distillation --task-args teacher=teacher {wrong} --device cpu --output-dir run"
        assert cli.run(typed.split()) == 2
        told = capsys.readouterr().err
        assert says in told
        assert told.count("\n") == 1
    assert cli.run(f"{typed.replace(wrong, 'temperature=2')} --epochs 1".split()) == 0


def test_a_figure_may_use_what_evaluations_alone_measure_if_it_says_so() -> None:
    """`in_training=False` is all that the refused ones lack."""
    task = Task(
        loss=loss,
        evaluated_measures=measuring(size=torch.abs),
        figures=(Figure("size", "size", value=lambda sums, count: float(sums["size"]) / count, in_training=False),),
    )
    begun(task)


def test_a_model_that_wants_a_number_of_outputs_needs_a_task_that_has_one() -> None:
    """The line says so, and names `outputs`."""

    def model(outputs: int) -> nn.Module:
        return line(outputs)

    with pytest.raises(UsageError, match=r"it cannot be called without an argument, as the task says no `outputs`: "):
        train(small_config(), model=model, data=rows, task=Task(loss=loss))
    train(small_config(epochs=1), model=model, data=rows, task=Task(loss=loss, outputs=1))
