"""`hvd-train audit`: the verdict on a ledger, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli


def test_the_exit_code_tells_whether_every_sample_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a whole ledger and 1 for one that lacks a step, with the verdict on standard output."""
    flags = ["--epochs", "1", "--device", "cpu", "--ledger", "--output-dir", "run"]
    assert cli.run(["train", "digits", *flags]) == 0
    capsys.readouterr()
    assert cli.run(["audit", "run"]) == 0
    whole = capsys.readouterr().out
    ledger = Path("run/ledger.jsonl")
    steps = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(steps[:7] + steps[8:]))
    assert cli.run(["audit", "run"]) == 1
    assert capsys.readouterr().out not in ("", whole)


def test_a_run_without_a_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the flag to train with, exit code 2."""
    Path("run").mkdir()
    assert cli.run(["audit", "run"]) == 2
    assert capsys.readouterr().err == "hvd-train: run has no ledger.jsonl: train with --ledger to have one\n"
