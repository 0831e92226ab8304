"""Config files are read back as written, and wrong files are refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest

from hvd_train import Config, config_file
from hvd_train.errors import UsageError

AWKWARD = ["", "no", "1e3", "~", "null", ": #", "- x", "2026-01-02", "0x1f", "'\"", "a\n\tb ", "ß 猫 \x85", "\x00"]


def test_a_written_config_is_read_back_unchanged() -> None:
    values: dict[str, Any] = {"seed": 2**63 - 1, "unfreeze": ("5:layer4.*", "10:*"), "decay_epochs": (1.0, 2.5)}
    values |= {"commit_seconds": None, "learning_rate": 1e-12, "momentum": 0.1 + 0.2, "nesterov": True}
    for text in AWKWARD:
        made = Config().replace(recipe=text, output_dir=Path(text or "x"), **values)
        path = Path("config.yaml")
        path.write_text(config_file.dump(made), encoding="utf-8")
        assert config_file.load(path) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {epoch: 3}", "unknown setting 'epoch'; did you mean 'epochs'"),
        ("dat: {data: digits}", "unknown setting 'dat'; did you mean 'data'"),
        ("optimizer: {optimizer: lion}", "optimizer is 'lion'; it must be one of sgd, adam, adamw"),
        ("optimizer: {learning_rate: fast}", "learning_rate is 'fast'; it must be float"),
        ("schedule: 3", "schedule must hold settings as `name: value`, not 3"),
        ("", "must hold settings"),
        ("a: [", "is not a YAML file"),
        ("schedule: {epochs: 0}", "--epochs is 0"),
        ("\xff\xfe\x00\x81", "mine.yaml is not a YAML file"),
        # A few bytes that expand to gigabytes, endless nesting and impossible values.
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "mine.yaml is not a YAML file: aliases are refused"),
        ("[" * 100_000, "mine.yaml is not a YAML file: it nests too deep"),
        ("data: 2026-99-99\n", "mine.yaml is not a YAML file: month must be in"),
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
    with pytest.raises(UsageError, match=r"cannot read none.yaml: No such file"):
        config_file.load(Path("none.yaml"))


def test_numbers_in_yaml_are_converted() -> None:
    """YAML reads 5 as an int and 1e-3 as text."""
    text = "optimizer: {learning_rate: 1e-3}\nschedule: {warmup_epochs: 5, decay_epochs: [1, 2]}\n"
    Path("run.yaml").write_text(text)
    made = config_file.load(Path("run.yaml"))
    assert made.optimizer.learning_rate == 0.001
    assert isinstance(made.schedule.warmup_epochs, float)
    assert made.schedule.decay_epochs == (1.0, 2.0)
