"""Export a trained model: its weights, and a program that needs no hvd_train."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.run import trained_parts
from hvd_train.run_files import durable
from hvd_train.world.world import Place

WEIGHTS, PROGRAM, ONNX, CARD = "weights.pt", "model.pt2", "model.onnx", "model.json"
_CLOSE = 1e-4  # of logits, which are of the order of 1 to 10: the order of additions may differ


def export(target: Path, output: Path, *, onnx: bool, trust: bool = False) -> list[Path]:
    """Write a run's best weights (or a checkpoint's), the torch.export program and, if asked for, ONNX.

    The program maps images float32 [batch, channels, height, width], normalised as model.json says, to logits
    [batch, classes]. Returns the paths of the files. Raises UsageError if `target` is no run, the model cannot be
    exported, or the program gives other logits; `trust` is as in `run.evaluate`.
    """
    config, parts = trained_parts(target, Place(), device="cpu", trust=trust)
    model = parts.model.eval()
    if not parts.data.images:
        raise UsageError(f"{target}: only models of images are exported; its weights are in model-best.pt")
    shape = parts.train_loader.example(1)[0].shape[1:]
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images)
    output.mkdir(parents=True, exist_ok=True)
    with durable.writing(output / WEIGHTS) as file:
        torch.save(model.state_dict(), file)
    written = [output / WEIGHTS, _program(model, images, expected, output / PROGRAM)]
    if onnx:
        written.append(_onnx(model, images, expected, output / ONNX))
    card = {
        "model": config.model.model,
        "classes": parts.data.classes,
        "input": ["batch", *images.shape[1:]],
        "mean": parts.data.mean,
        "std": parts.data.std,
        "transform_input": bool(getattr(model, "transform_input", False)),
    }
    durable.write_text(output / CARD, json.dumps(card, indent=1) + "\n")
    return [*written, output / CARD]


def _program(model: nn.Module, images: Tensor, expected: Tensor, path: Path) -> Path:
    with _exporting("torch.export"):
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    with durable.writing(path) as file:
        torch.export.save(program, file)
    loaded = torch.export.load(path).module()
    _check(path, expected, lambda: loaded(images))
    return path


def _onnx(model: nn.Module, images: Tensor, expected: Tensor, path: Path) -> Path:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # torch.onnx needs it
    except ImportError as error:
        raise UsageError(f"--onnx needs {error.name}: pip install onnx onnxscript onnxruntime") from None
    path.unlink(missing_ok=True)  # a link would be followed
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    with _exporting("torch.onnx"):
        torch.onnx.export(model, (images,), path, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), **options)
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (found.name for found in session.get_inputs())
    _check(path, expected, lambda: torch.from_numpy(session.run(None, {name: images.numpy()})[0]))
    return path


@contextmanager
def _exporting(exporter: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch may raise anything for a model that it cannot trace
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"{exporter} cannot take this model: {first}") from error


def _check(path: Path, expected: Tensor, run: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        difference = float((run() - expected).abs().max())
    if not difference <= _CLOSE * max(1.0, float(expected.abs().max())):
        raise UsageError(f"{path} gives other logits than the model: by up to {difference:.2g}; do not use it")
