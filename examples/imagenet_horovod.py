"""ResNet-50 on ImageNet by the recipe of Horovod's own example, for who has a program that began as that one.

horovodrun -np 8 python examples/imagenet_horovod.py --data-dir /data/imagenet

DATA has a folder `train` and a folder `val`, each with a folder for every class. Horovod's example, of the same 90
epochs, reaches about 76% top-1; on 8 GPUs of today that takes some hours. (Not run here to its end.) On a CPU, to see
that it runs: `--epochs 1 --arch resnet18` on a few hundred images takes a minute.

What the example does by hand is not here: hvd.init, a device for each rank, samplers, broadcasts, metrics averaged over
ranks, checkpoints on rank 0. The same command goes on where the last one ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import datasets, models, transforms

import hvd_train

NORMAL = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
FOR_TRAINING = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), NORMAL]
FOR_EVALUATION = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), NORMAL]


def hits(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return for each image whether its class is the likeliest one, and whether it is among the likeliest five."""
    likeliest = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return {"top1": likeliest[:, 0], "top5": likeliest.any(1)}


def score(model: nn.Module, items: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    """Return what an evaluation adds up over all images."""
    images, labels = items
    logits = model(images)
    return {"loss": F.cross_entropy(logits, labels, reduction="none"), **hits(logits, labels)}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches-per-allreduce", type=int, default=1)
    parser.add_argument("--base-lr", type=float, default=0.0125, help="for a batch of one GPU")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    train_set = datasets.ImageFolder(f"{args.data_dir}/train", transforms.Compose(FOR_TRAINING))
    val_set = datasets.ImageFolder(f"{args.data_dir}/val", transforms.Compose(FOR_EVALUATION))
    model = models.get_model(args.arch, num_classes=len(train_set.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)

    with hvd_train.session(
        model,
        optimizer,
        train_set,
        validation=val_set,
        epochs=args.epochs,
        batch_size=args.batch_size,
        accumulation_steps=args.batches_per_allreduce,
        measures=[hvd_train.mean(name, better="higher", form=".2%") for name in ("top1", "top5")],
        best="top1",
        schedule="step",  # a tenth of the learning rate after 30, 60 and 80 epochs
        warmup_epochs=min(5, args.epochs),
        lr_scaling="linear",  # with the global batch
        lr_base_batch=args.batch_size,
        compression="fp16" if args.fp16_allreduce else "none",
        workers=args.workers,
    ) as session:
        for step in session:
            with step:
                for slot in step:
                    images, labels = slot.data
                    logits = model(images)
                    slot.backward(F.cross_entropy(logits, labels), **hits(logits, labels))
                step.finish()
                if step.ends_epoch:
                    session.evaluate(score)


if __name__ == "__main__":
    main()
