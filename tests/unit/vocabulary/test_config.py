"""The vocabulary of a run: what it refuses, and that a written config is the config read back."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import Config, config, recipes
from hvd_train.config import GROUPS, from_dict
from hvd_train.errors import UsageError


def values_of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, most of them allowed."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        items = {float: st.floats(0, 1e6), int: st.integers(0, 9), str: st.just("5:layer4.*")}[get_args(hint)[0]]
        return st.lists(items, max_size=4).map(lambda found: tuple(sorted(found)))
    if get_origin(get_args(hint)[0] if get_args(hint) else None) is tuple:
        return st.none() | values_of(name, get_args(hint)[0])
    options = [option for option in (get_args(hint) or (hint,)) if option is not type(None)]
    plain = {
        bool: st.booleans(),
        int: st.integers(1, 2**40),
        float: st.floats(1e-12, 0.999999),
        str: st.text(st.characters(codec="utf-8"), max_size=8),
        Path: st.text("abc./ éß:#-", min_size=1, max_size=12).map(Path),
    }
    found = st.one_of([plain[option] for option in options])
    return st.one_of(st.none(), found) if type(None) in get_args(hint) else found


FIELDS = {
    f.name: values_of(f.name, get_type_hints(cls)[f.name]) for cls in GROUPS.values() for f in dataclasses.fields(cls)
}
FIELDS["seed"] = st.integers(0, 2**63)
FIELDS["recipe"] = st.text(max_size=8)


@given(changes=st.fixed_dictionaries({}, optional=FIELDS))
def test_a_written_config_is_read_back_as_it_was(changes: dict[str, Any]) -> None:
    """YAML keeps every value of every field, through the text and through the plain dict."""
    try:
        made = Config().replace(**changes)
    except UsageError:
        return  # a combination that cannot be
    path = Path("config.yaml")
    path.write_text(config.dump(made), encoding="utf-8")
    assert config.load(path) == made
    assert from_dict(made.as_dict()) == made
    assert made.differences(config.load(path)) == []


def test_field_names_are_unique_across_groups_and_documented() -> None:
    """A flag needs no prefix, and its help is the text under the field."""
    own = [f.name for f in dataclasses.fields(Config) if f.name not in GROUPS]
    names = own + [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    source = Path(config.__file__).read_text()
    for cls in GROUPS.values():
        for field in dataclasses.fields(cls):
            assert re.search(rf'^    {field.name}: .*\n    """', source, re.MULTILINE), field.name


def test_replace_finds_a_field_in_whatever_group_it_is() -> None:
    """Values of several groups change at once; the rest stays and the old config too."""
    base = Config()
    changed = base.replace(epochs=3, learning_rate=0.5, seed=9)
    assert (changed.schedule.epochs, changed.optimizer.learning_rate, changed.seed) == (3, 0.5, 9)
    assert changed.data == base.data
    assert (base.schedule.epochs, base.seed) == (10, 0)


def test_replace_names_the_nearest_setting() -> None:
    """A misspelt setting is answered with the one that was meant."""
    with pytest.raises(UsageError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"):
        Config().replace(learning_rat=1)


def test_differences_name_what_decides_the_result_and_nothing_else() -> None:
    """Where, how often and on what device may change from one life of a run to the next."""
    base = Config()
    free = base.replace(
        data_dir=Path("x"), workers=9, device="cuda", output_dir=Path("y"), resume="never", commit_steps=7,
        commit_seconds=1.0, keep_checkpoints=9, log_steps=9, eval_epochs=9, recipe="other",
    )  # fmt: skip
    assert base.differences(free) == []
    other = base.replace(epochs=4, seed=2, decay_epochs=(1.0,))
    assert base.differences(other) == ["seed: 0, not 2", "epochs: 10, not 4", "decay_epochs: [30, 60, 80], not [1.0]"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image_size": 0}, "--image-size is 0; it must be at least 1"),
    ({"workers": -1}, "--workers is -1; it must be at least 0"),
    ({"synthetic_samples": 0}, "--synthetic-samples is 0"),
    ({"data": "folder"}, "--data folder needs --data-dir"),
    ({"download": True}, "--download does not go with --data digits"),
    ({"batch_size": 0}, "--batch-size is 0"),
    ({"global_batch_size": 0}, "--global-batch-size is 0"),
    ({"accumulation_steps": 0}, "--accumulation-steps is 0"),
    ({"eval_batch_size": 0}, "--eval-batch-size is 0"),
    ({"batch_size": None, "global_batch_size": None}, "no batch size: give --batch-size"),
    ({"learning_rate": 0.0}, "--learning-rate is 0; it must be a number above 0"),
    ({"learning_rate": float("nan")}, "--learning-rate is nan"),
    ({"learning_rate": float("inf")}, "--learning-rate is inf"),
    ({"lr_base_batch": 0}, "--lr-base-batch is 0"),
    ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
    ({"weight_decay": float("nan")}, "--weight-decay is nan"),
    ({"momentum": 1.0}, "--momentum is 1; it must be at least 0 and below 1"),
    ({"label_smoothing": 1.0}, "--label-smoothing is 1"),
    ({"clip_norm": 0.0}, "--clip-norm is 0"),
    ({"nesterov": True, "momentum": 0.0}, "--nesterov needs --optimizer sgd or lars with a momentum above 0"),
    ({"nesterov": True, "optimizer": "adam"}, "--nesterov needs --optimizer sgd"),
    ({"reduction": "adasum", "clip_norm": 1.0}, "--clip-norm does not go with --reduction adasum"),
    ({"reduction": "adasum", "gradient_predivide_factor": 2.0}, "--gradient-predivide-factor does not go with"),
    ({"gpu_ids": (0, 0)}, "--gpu-ids names a GPU twice"),
    ({"val_crop_size": 40}, "--val-crop-size and --val-resize-size go with --data folder"),
    ({"random_erasing": 1.5}, "--random-erasing is 1.5; it must be at least 0 and at most 1"),
    ({"epochs": 0}, "--epochs is 0"),
    ({"warmup_epochs": -1.0}, "--warmup-epochs is -1"),
    ({"warmup_epochs": 11.0}, "--warmup-epochs 11 is longer than the whole run (--epochs 10)"),
    ({"decay_factor": 0.0}, "--decay-factor is 0"),
    ({"decay_epochs": (3.0, 2.0)}, "--decay-epochs must rise"),
    ({"commit_steps": 0}, "--commit-steps is 0"),
    ({"commit_seconds": 0.0}, "--commit-seconds is 0"),
    ({"keep_checkpoints": 0}, "--keep-checkpoints is 0"),
    ({"log_steps": 0}, "--log-steps is 0"),
    ({"eval_epochs": 0}, "--eval-epochs is 0"),
    ({"seed": -1}, "--seed is -1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Config().replace(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {epoch: 3}", "unknown setting 'epoch'; did you mean 'epochs'"),
        ("dat: {data: digits}", "unknown setting 'dat'; did you mean 'data'"),
        ("schedule: {epochs: many}", "epochs is 'many'; it must be int"),
        ("schedule: {epochs: true}", "epochs is True; it must be int"),
        ("optimizer: {optimizer: lion}", "optimizer is 'lion'; it must be one of sgd, adam, adamw"),
        ("optimizer: {learning_rate: fast}", "learning_rate is 'fast'; it must be float"),
        ("schedule: 3", "schedule must hold settings as `name: value`, not 3"),
        ("- a list", "must hold settings"),
        ("", "must hold settings"),
        ("a: [", "is not a YAML file"),
        ("schedule: {epochs: 0}", "--epochs is 0"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_name(text: str, message: str) -> None:
    """One line with the file and the entry."""
    path = Path("mine.yaml")
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        config.load(path)
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused() -> None:
    """Not a traceback of open() or of the decoder."""
    with pytest.raises(UsageError, match=r"cannot read none.yaml: No such file"):
        config.load(Path("none.yaml"))
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UsageError, match=r"binary.yaml is not a YAML file"):
        config.load(Path("binary.yaml"))


def test_whole_numbers_stand_for_floats() -> None:
    """`warmup_epochs: 5` in a file is 5.0."""
    made = from_dict({"schedule": {"warmup_epochs": 5, "decay_epochs": [1, 2]}})
    assert isinstance(made.schedule.warmup_epochs, float)
    assert made.schedule.decay_epochs == (1.0, 2.0)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_complete_and_bears_its_name(name: str) -> None:
    """A recipe is a config that can be written and read; its docstring says the command."""
    made = recipes.get(name)
    assert made.recipe == name
    assert from_dict(made.as_dict()) == made
    assert f"hvd-train train {name}" in (recipes.RECIPES[name].__doc__ or "")


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    """`digit` is `digits`; a name like no other gets the list."""
    with pytest.raises(UsageError, match="unknown recipe 'digit'; did you mean 'digits'"):
        recipes.get("digit")
    with pytest.raises(UsageError, match="unknown recipe 'xxxxxx'; known: "):
        recipes.get("xxxxxx")


def test_numbers_as_people_write_them_in_yaml(tmp_path: Path) -> None:
    """1e-3 in a hand-written config.yaml is a number, though YAML reads it as text; a word is still refused."""
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {learning_rate: 1e-3}\n")
    assert config.load(file).optimizer.learning_rate == 0.001
    file.write_text("optimizer: {learning_rate: fast}\n")
    with pytest.raises(UsageError, match="learning_rate is 'fast'"):
        config.load(file)


@pytest.mark.parametrize(("text", "seconds"), [("2h30m", 9000), ("90m", 5400), ("45s", 45), ("1h0m5s", 3605)])
def test_a_time_limit_is_written_as_people_do(text: str, seconds: float) -> None:
    """Hours, minutes and seconds, each where it is needed."""
    assert Config().replace(max_time=text).run.max_seconds == seconds


@pytest.mark.parametrize("text", ["", "2", "2 hours", "30m2h", "1.5h", "-1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """With an example of what is."""
    with pytest.raises(UsageError, match="write it as in 2h30m"):
        Config().replace(max_time=text)


def test_epochs_that_would_see_some_samples_more_often() -> None:
    """Epochs that repeated augmentation cannot fill evenly are refused, with the number to type."""
    with pytest.raises(UsageError, match=r"--epochs 5 is not a multiple of --repeated-augmentation 4.*type --epochs 8"):
        Config().replace(epochs=5, repeated_augmentation=4)
