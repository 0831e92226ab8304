"""`hvd-train export`: where the files go."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli


@pytest.mark.parametrize(
    ("target", "flags", "folder"),
    [
        ("run", [], "run/export"),
        ("step-0000000007.ckpt", [], "step-0000000007.ckpt.export"),
        ("run", ["--output", "elsewhere"], "elsewhere"),
    ],
)
def test_files_go_beside_what_was_exported_or_where_the_user_says(
    target: str, flags: list[str], folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the run folder, or beside a checkpoint; the path of each file is printed."""
    Path("run").mkdir()

    def export(target: Path, folder: Path, *, onnx: bool, trust: bool) -> list[Path]:
        assert not onnx
        assert not trust
        return [folder / "weights.pt", folder / "model.pt2"]

    monkeypatch.setattr("hvd_train.export.export", export)
    assert cli.run(["export", target, *flags]) == 0
    assert capsys.readouterr().out == f"{folder}/weights.pt\n{folder}/model.pt2\n"


def test_a_link_in_a_run_is_not_followed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever has made the run may have planted it; the user's own word for the same folder is taken."""
    Path("run").mkdir()
    Path("outside").mkdir()
    Path("run/export").symlink_to("../outside")
    monkeypatch.setattr("hvd_train.export.export", lambda target, folder, **named: [folder / "weights.pt"])
    assert cli.run(["export", "run"]) == 2
    told = "hvd-train: run/export is a link, which is not followed: name a folder with --output\n"
    assert capsys.readouterr() == ("", told)
    assert cli.run(["export", "run", "--output", "run/export"]) == 0
