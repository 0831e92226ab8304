"""`hvd-train show-data`: what is shown, and where the picture goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import Config, cli


@pytest.mark.parametrize(
    ("flags", "ranks", "picture"),
    [([], 1, "show-data.png"), (["--ranks", "4"], 4, "show-data.png"), (["--output=seen.png"], 1, "seen.png")],
)
def test_a_picture_for_so_many_ranks(
    flags: list[str], ranks: int, picture: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags of a training say what is shown; the command's own may stand anywhere among them."""

    def show(config: Config, num_ranks: int, path: Path) -> str:
        return f"{config.recipe} {config.seed} {num_ranks} {path}"

    monkeypatch.setattr("hvd_train.report.samples.show", show)
    assert cli.run(["show-data", *flags, "digits", "--seed", "5"]) == 0
    assert capsys.readouterr().out == f"digits 5 {ranks} {picture}\n"
