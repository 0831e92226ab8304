"""Export a trained model: its weights, and a program that needs no hvd_train."""

import json
from pathlib import Path

import torch

from hvd_train.errors import UsageError, first_line
from hvd_train.network import weights
from hvd_train.run import trained_parts
from hvd_train.run_files import durable
from hvd_train.world.world import Place

WEIGHTS = "weights.pt"
PROGRAM = "model.pt2"
CARD = "model.json"
_CLOSE = 1e-4  # of logits, which are of the order of 1 to 10: the order of additions may differ


def export(target: Path, output: Path, *, trust: bool = False) -> list[Path]:
    """Write a run's best weights (or a checkpoint's) and the torch.export program.

    The program maps images float32 [batch, channels, height, width], normalised as model.json says,
    to logits [batch, classes]. Returns the paths of the files. Raises UsageError if `target` is no
    run, the model cannot be exported, or the program gives other logits; `trust` is as in
    `run.evaluate`.
    """
    config, parts = trained_parts(target, Place(), trust=trust, device="cpu")
    model = parts.model.eval()
    if not parts.data.images:
        raise UsageError(
            f"{target}: only models of images are exported; its weights are in model-best.pt"
        )
    shape = parts.train_loader.example(1)[0].shape[1:]
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    output.mkdir(parents=True, exist_ok=True)
    with durable.writing(output / WEIGHTS) as file:
        torch.save(weights.for_file(model.state_dict()), file)
    try:
        with torch.no_grad():
            any_batch = ({0: torch.export.Dim("batch", min=1)},)
            program = torch.export.export(model, (images,), dynamic_shapes=any_batch)
            with durable.writing(output / PROGRAM) as file:
                torch.export.save(program, file)
            expected = model(images)
            found = torch.export.load(output / PROGRAM).module()(images)
    except Exception as error:  # torch may raise anything for a model that it cannot trace
        raise UsageError(f"cannot export this model: {first_line(error)}") from error
    difference = float((found - expected).abs().max())
    if not difference <= _CLOSE * max(1.0, float(expected.abs().max())):
        raise UsageError(
            f"{output / PROGRAM} gives other logits than the model: by up to {difference:.2g}"
        )
    card = {
        "model": config.model.model,
        "classes": parts.data.classes,
        "input": ["batch", *images.shape[1:]],
        "mean": parts.data.mean,
        "std": parts.data.std,
        "transform_input": bool(getattr(model, "transform_input", False)),
    }
    durable.write_text(output / CARD, json.dumps(card, indent=1) + "\n")
    return [output / name for name in (WEIGHTS, PROGRAM, CARD)]
