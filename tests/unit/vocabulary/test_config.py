"""Configs: fields by name, refused values, settings that may differ on resume, and config files."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train import Config, config_file, recipes


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_complete_and_documented(name: str) -> None:
    made = recipes.get(name)
    assert made.recipe == name
    assert config_file.from_dict(made.as_dict(), "it") == made
    assert f"hvd-train train {name}" in (recipes.RECIPES[name].__doc__ or "")


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


def test_time_limits_and_profiled_steps_are_parsed() -> None:
    """The last step is profiled, too."""
    times = {"2h30m": 9000, "45s": 45, "1h0m5s": 3605, "1.5h": 5400, ".5m": 30}
    for text, seconds in times.items():
        assert Config().replace(max_time=text).run.max_seconds == seconds
    for text, steps in {"20": range(20, 21), "20:25": range(20, 26)}.items():
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


TYPED = """
seed: 010
log_steps: 1_0
profile: 20:25
channels_last: off
recipe: 2026-11-29
freeze: no
learning_rate: 1e-3
nesterov: true
patience: null
target: ~
weights:
decay_epochs: [3, 5]
"""


def test_values_in_a_file_are_read_as_they_are_typed() -> None:
    """YAML 1.1 has octal numbers, times of day, dates, and `off` as False."""
    Path("config.yaml").write_text(TYPED)
    assert config_file.load(Path("config.yaml")) == Config().replace(
        seed=10,
        log_steps=10,
        profile="20:25",
        channels_last="off",
        recipe="2026-11-29",
        freeze="no",
        learning_rate=0.001,
        nesterov=True,
        decay_epochs=(3, 5),
    )
