"""Configs: fields by name, refused values, settings that may differ on resume, and config files."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train import Config, config_file, recipes
from hvd_train.errors import UsageError


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_complete_and_documented(name: str) -> None:
    made = recipes.get(name)
    assert made.recipe == name
    assert config_file.from_dict(made.as_dict(), "it") == made
    assert f"hvd-train train {name}" in (recipes.RECIPES[name].__doc__ or "")


def test_replace_finds_a_field_in_any_group() -> None:
    base = Config()
    changed = base.replace(epochs=3, seed=9)
    assert (changed.schedule.epochs, changed.seed, changed.data) == (3, 9, base.data)
    assert base == Config()
    with pytest.raises(
        UsageError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"
    ):
        base.replace(learning_rat=1)


def test_only_settings_that_do_not_change_the_result_may_differ_on_resume() -> None:
    base = Config()
    free = base.replace(
        data_dir=Path("x"),
        workers=9,
        device="cuda",
        output_dir=Path("y"),
        resume="never",
        commit_steps=7,
        commit_seconds=1.0,
        keep_checkpoints=9,
        log_steps=9,
        eval_epochs=9,
        patience=4,
        threads=3,
    )
    assert base.differences(free) == []
    exact = base.replace(reduction="exact")
    assert exact.differences(exact.replace(threads=3)) == ["threads: None, not 3"]
    other = base.replace(epochs=4, seed=2, decay_epochs=(1.0,))
    assert base.differences(other) == [
        "seed: 0, not 2",
        "epochs: 10, not 4",
        "decay_epochs: [30, 60, 80], not [1.0]",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": None, "global_batch_size": None}, "no batch size: give --batch-size"),
        *(({"max_time": text}, "its units") for text in ("", "2", "30m2h", "-1h", ".h")),
        *(
            ({"keep_checkpoints": kept}, f"--keep-checkpoints {kept}: type a number")
            for kept in (0, -1, "", "many", "3,", "every=5", "3,every=0", "0,every=5")
        ),
        *(({"profile": text}, f"--profile {text}: ") for text in ("", "0:3", "5:4", "²", "1:")),
    ],
)
def test_impossible_values_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Config().replace(**changes)
    assert "\n" not in str(caught.value)


def test_time_limits_and_profiled_steps_are_parsed() -> None:
    """The last step is profiled, too."""
    for text, seconds in (
        ("2h30m", 9000),
        ("90m", 5400),
        ("45s", 45),
        ("1h0m5s", 3605),
        ("1.5h", 5400),
        (".5m", 30),
    ):
        assert Config().replace(max_time=text).run.max_seconds == seconds
    for text, steps in (("20", range(20, 21)), ("20:25", range(20, 26)), ("1:50", range(1, 51))):
        assert Config().replace(profile=text).run.profiled_steps == steps


TEXTS = st.text() | st.sampled_from(
    ["no", "1e3", "~", "null", ": #", "- x", "2026-01-02", "0x1f", "20:25"]
)
VALUES = {
    "recipe": TEXTS,
    "output_dir": st.none() | TEXTS.filter(bool).map(Path),
    "unfreeze": st.lists(st.sampled_from(["5:layer4.*", "10:*"]), unique=True).map(tuple),
    "seed": st.integers(0, 2**63 - 1),
    "decay_epochs": st.lists(st.floats(0.1, 99), unique=True).map(sorted).map(tuple),
    "commit_seconds": st.none() | st.floats(0.1, 99),
    "learning_rate": st.floats(1e-300, 9),
    "momentum": st.floats(0.01, 0.99),
    "nesterov": st.booleans(),
}


@settings(max_examples=30)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_written_config_is_read_back_unchanged(values: dict[str, Any]) -> None:
    made = Config().replace(**values)
    path = Path("config.yaml")
    path.write_text(config_file.dump(made), encoding="utf-8")
    assert config_file.load(path) == made


def test_values_in_a_file_are_read_as_they_are_typed() -> None:
    """YAML 1.1 has octal numbers, times of day, dates, and `off` as False."""
    lines = [
        "seed: 010",
        "log_steps: 1_0",
        "profile: 20:25",
        "channels_last: off",
        "recipe: 2026-11-29",
        "freeze: no",
    ]
    lines += ["learning_rate: 1e-3", "nesterov: true", "patience: null", "target: ~", "weights:"]
    Path("config.yaml").write_text("\n".join([*lines, "decay_epochs: [3, 5]"]))
    typed = {
        "seed": 10,
        "log_steps": 10,
        "profile": "20:25",
        "channels_last": "off",
        "recipe": "2026-11-29",
    }
    typed |= {"freeze": "no", "learning_rate": 0.001, "nesterov": True, "decay_epochs": (3, 5)}
    assert config_file.load(Path("config.yaml")) == Config().replace(**typed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 1\nseed: 2\nepochs: 3", "mine.yaml is not a YAML file: epochs is given twice"),
        ("<<: {epochs: 3}", "mine.yaml: unknown setting '<<'"),
        ("seed: !!int 0x10", "mine.yaml: --seed is '0x10'; it must be a whole number"),
        ("nesterov: off", "mine.yaml: --nesterov is 'off'; it must be true or false"),
        ("epochs: true", "mine.yaml: --epochs is True; it must be a whole number"),
        ("clip_norm: [1]", "mine.yaml: --clip-norm is [1]; it must be a number or none"),
        ("decay_epochs: 3", "mine.yaml: --decay-epochs is 3; it must be a list"),
        (
            "precision: fp8",
            "mine.yaml: --precision is 'fp8'; it must be one of auto, fp32, fp16, bf16",
        ),
        # A few bytes that expand to gigabytes, endless nesting and impossible values.
        (
            "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
            "mine.yaml is not a YAML file: aliases are refused",
        ),
        ("[" * 5_000, "mine.yaml is not a YAML file: it nests too deep"),
    ],
    ids=lambda text: ascii(text[:30]),
)
def test_a_file_that_is_no_config_is_refused_by_name(text: str, message: str) -> None:
    path = Path("mine.yaml")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        config_file.load(path)
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
