"""Export a trained model: its weights, and a program that needs no hvd_train."""

import importlib.util
import json
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
_SHAPES = ({0: torch.export.Dim("batch", min=1)},)


def export(target: Path, output: Path, *, onnx: bool, trust: bool = False) -> list[Path]:
    """Write a run's best weights (or a checkpoint's), the torch.export program and, if asked for, ONNX.

    The program maps images float32 [batch, channels, height, width], normalised as model.json says, to logits
    [batch, classes]. Returns the paths of the files. Raises UsageError if `target` is no run, the model cannot be
    exported, or the program gives other logits; `trust` is as in `run.evaluate`.
    """
    config, parts = trained_parts(target, Place(), trust=trust, device="cpu")
    model = parts.model.eval()
    if not parts.data.images:
        raise UsageError(f"{target}: only models of images are exported; its weights are in model-best.pt")
    if onnx and not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        raise UsageError("--onnx needs: pip install onnx onnxscript onnxruntime")
    shape = parts.train_loader.example(1)[0].shape[1:]
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    output.mkdir(parents=True, exist_ok=True)
    with durable.writing(output / WEIGHTS) as file:
        torch.save(model.state_dict(), file)
    try:
        with torch.no_grad():
            logits = {WEIGHTS: model(images), PROGRAM: _program(model, images, output / PROGRAM)}
            if onnx:
                logits[ONNX] = _onnx(model, images, output / ONNX)
    except Exception as error:  # torch may raise anything for a model that it cannot trace
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"cannot export this model: {first}") from error
    for name, found in logits.items():
        difference = float((found - logits[WEIGHTS]).abs().max())
        if not difference <= _CLOSE * max(1.0, float(logits[WEIGHTS].abs().max())):
            raise UsageError(f"{output / name} gives other logits than the model: by up to {difference:.2g}")
    card = {
        "model": config.model.model,
        "classes": parts.data.classes,
        "input": ["batch", *images.shape[1:]],
        "mean": parts.data.mean,
        "std": parts.data.std,
        "transform_input": bool(getattr(model, "transform_input", False)),
    }
    durable.write_text(output / CARD, json.dumps(card, indent=1) + "\n")
    return [output / name for name in (*logits, CARD)]


def _program(model: nn.Module, images: Tensor, path: Path) -> Tensor:
    """Write the program, and return its logits."""
    program = torch.export.export(model, (images,), dynamic_shapes=_SHAPES)
    with durable.writing(path) as file:
        torch.export.save(program, file)
    logits: Tensor = torch.export.load(path).module()(images)
    return logits


def _onnx(model: nn.Module, images: Tensor, path: Path) -> Tensor:
    """Write the ONNX model, and return its logits."""
    import onnxruntime  # an optional library

    path.unlink(missing_ok=True)  # a link would be followed
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(model, (images,), path, dynamic_shapes=_SHAPES, **options)
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (found.name for found in session.get_inputs())
    return torch.from_numpy(session.run(None, {name: images.numpy()})[0])
