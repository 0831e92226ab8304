"""A written config is the config read back, and a file that is none is refused with its name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import Config, config_file
from hvd_train.config import GROUPS
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
    path.write_text(config_file.dump(made), encoding="utf-8")
    assert config_file.load(path) == made
    assert config_file.from_dict(made.as_dict()) == made
    assert made.differences(config_file.load(path)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {epoch: 3}", "unknown setting 'epoch'; did you mean 'epochs'"),
        ("dat: {data: digits}", "unknown setting 'dat'; did you mean 'data'"),
        ("schedule: {epochs: many}", "epochs is 'many'; it must be a whole number"),
        ("schedule: {epochs: true}", "epochs is True; it must be a whole number"),
        ("optimizer: {optimizer: lion}", "unknown optimizer 'lion'; known: adam, adamw, lamb, lars, sgd"),
        ("optimizer: {optimizer_args: [lr]}", "--optimizer-args lr: it must be name=value"),
        ("precision: {precision: luck}", "precision is 'luck'; it must be one of fp32, fp16, bf16"),
        ("optimizer: {learning_rate: fast}", "learning_rate is 'fast'; it must be a number"),
        ("run: {commit_steps: often}", "commit_steps is 'often'; it must be a whole number or none"),
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
        config_file.load(path)
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused() -> None:
    """Not a traceback of open() or of the decoder."""
    with pytest.raises(UsageError, match=r"cannot read none.yaml: No such file"):
        config_file.load(Path("none.yaml"))
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UsageError, match=r"binary.yaml is not a YAML file"):
        config_file.load(Path("binary.yaml"))


def test_whole_numbers_stand_for_floats() -> None:
    """`warmup_epochs: 5` in a file is 5.0."""
    made = config_file.from_dict({"schedule": {"warmup_epochs": 5, "decay_epochs": [1, 2]}})
    assert isinstance(made.schedule.warmup_epochs, float)
    assert made.schedule.decay_epochs == (1.0, 2.0)


def test_numbers_as_people_write_them_in_yaml(tmp_path: Path) -> None:
    """1e-3 in a hand-written config.yaml is a number, though YAML reads it as text; a word is still refused."""
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {learning_rate: 1e-3}\n")
    assert config_file.load(file).optimizer.learning_rate == 0.001
    file.write_text("optimizer: {learning_rate: fast}\n")
    with pytest.raises(UsageError, match="learning_rate is 'fast'"):
        config_file.load(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases are refused"),
        ("[" * 100_000, "it nests too deep"),
        ("data: 2026-99-99\n", "month must be in"),
        ("? [a]\n: b\n", "while constructing a mapping"),
    ],
    ids=["aliases", "nesting", "a day that is none", "a list as a name"],
)
def test_yaml_that_is_an_attack_is_one_line(text: str, reason: str) -> None:
    """Aliases, by which a few bytes stand for gigabytes, endless nesting and values that cannot be."""
    Path("config.yaml").write_text(text)
    with pytest.raises(UsageError) as refused:
        config_file.load(Path("config.yaml"))
    assert str(refused.value).startswith(f"config.yaml is not a YAML file: {reason}")
    assert "\n" not in str(refused.value)


def test_what_yaml_reads_as_something_else_is_taken_as_it_was_meant() -> None:
    """`None` for no value, and a number where text is wanted."""
    values = config_file.parse(
        "model: {weights: None, freeze: None}\nprecision: {compression: None}\nrun: {max_time: 90, profile: 20}"
    )
    made = config_file.from_dict(values)
    assert (made.model.weights, made.model.freeze, made.precision.compression) == (None, "none", "none")
    assert (made.run.max_seconds, made.run.profiled_steps) == (90, range(20, 21))
