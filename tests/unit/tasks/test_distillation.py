"""The loss of distillation by hand, and a teacher that is never taught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_train import cli, config_file
from hvd_train.errors import UsageError
from hvd_train.run import evaluate
from hvd_train.tasks.distillation import Both, distillation
from hvd_train.tasks.meter import Meter

pytestmark = pytest.mark.numeric


def test_distillation_by_hand() -> None:
    """The parts of its loss, and the figures of the student alone."""
    student, teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    targets, both = torch.tensor([0, 0]), Both(student, teacher)
    task = distillation(("a", "b"), nn.Identity(), temperature=2.0, weight=0.75)
    p, q = (teacher / 2).softmax(1), (student / 2).softmax(1)
    expected = 0.75 * 4 * (p * (p / q).log()).sum(1) + 0.25 * F.cross_entropy(student, targets, reduction="none")
    assert task.loss(both, targets).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    meter = Meter.of(task, both, targets, 2)
    numbers = meter.evaluated_sums(both, targets, 2)
    sums = meter.evaluation.read(numbers.tolist())
    assert sums["loss"] == pytest.approx(F.cross_entropy(student, targets, reduction="sum").item())
    assert sums["hits"][0] == 1
    with pytest.raises(UsageError, match=r"the temperature must be above 0, and the weight from 0 to 1"):
        distillation(("a", "b"), nn.Identity(), weight=1.5)


def test_a_teacher_is_asked_and_never_taught() -> None:
    """Its outputs have no gradient: that of a student with the same weights is zero, and it has none itself."""
    teacher = nn.Linear(3, 2)
    student = nn.Linear(3, 2)
    student.load_state_dict(teacher.state_dict())
    task = distillation(("a", "b"), teacher, weight=1.0)
    both = task.forward(student, torch.randn(4, 3))
    torch.autograd.backward(task.loss(both, torch.zeros(4, dtype=torch.long)).sum())
    assert (both.teacher.requires_grad, teacher.weight.grad) == (False, None)
    assert student.weight.grad is not None
    assert student.weight.grad.abs().max() < 1e-6


def test_who_evaluates_a_student_runs_no_code_of_its_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    """Anybody may have written the run folder, and the teacher is not needed: a student is scored as any classifier."""
    assert cli.run(["train", "digits", "--epochs", "1", "--output-dir", "run", "--device", "cpu"]) == 0
    Path("evil.py").write_text("open('ran', 'w').close()\ndef net(num_classes): ...\n")
    plain = evaluate(Path("run"), device="cpu")
    config = Path("run/config.yaml")
    run = config_file.load(config).replace(task="distillation", task_args=("teacher=evil:net", "teacher_weights=x.pt"))
    config.write_text(config_file.dump(run))
    assert evaluate(Path("run"), device="cpu").values == plain.values
    assert cli.run(["show-data", "--config", "run/config.yaml", "--output", "picture.png"]) == 0
    assert not Path("ran").exists()
