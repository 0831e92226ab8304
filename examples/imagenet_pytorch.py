"""ImageNet by the recipe of PyTorch's own example, for who has a program that began as that one.

horovodrun -np 8 python examples/imagenet_pytorch.py /data/imagenet --arch resnet18

DATA has a folder `train` and a folder `val`, each with a folder for every class. PyTorch's example reaches about 70%
top-1 with ResNet-18 in 90 epochs; on 8 GPUs of today that takes an hour or two. (Not run here to its end.) On a CPU, to
see that it runs: `--epochs 1` on a few hundred images takes a minute.

What the example does by hand is not here: process groups, DistributedDataParallel, samplers and their epochs, meters
that are reduced, checkpoints and --resume. The learning rate is set by hand, as there: from the epoch of the step.
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


def score(model: nn.Module, items: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    """Return the loss of each image, and whether its class is the likeliest one."""
    images, labels = items
    logits = model(images)
    return {"loss": F.cross_entropy(logits, labels, reduction="none"), "acc1": logits.argmax(1) == labels}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("-a", "--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="over all GPUs")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument("-j", "--workers", type=int, default=4)
    parser.add_argument("--pretrained", action="store_true")
    args = parser.parse_args()

    train_set = datasets.ImageFolder(f"{args.data}/train", transforms.Compose(FOR_TRAINING))
    val_set = datasets.ImageFolder(f"{args.data}/val", transforms.Compose(FOR_EVALUATION))
    if args.pretrained:
        model = models.get_model(args.arch, weights="DEFAULT")
    else:
        model = models.get_model(args.arch, num_classes=len(train_set.classes))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd)

    with hvd_train.session(
        model,
        optimizer,
        train_set,
        validation=val_set,
        epochs=args.epochs,
        global_batch_size=args.batch_size,
        measures=[hvd_train.mean("acc1", better="higher", form=".2%")],
        best="acc1",
        workers=args.workers,
    ) as session:
        for step in session:
            with step:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * 0.1 ** (step.epoch // 30)
                for slot in step:
                    images, target = slot.data
                    output = model(images)
                    slot.backward(F.cross_entropy(output, target), acc1=output.argmax(1) == target)
                step.finish()
                if step.ends_epoch:
                    session.evaluate(score)


if __name__ == "__main__":
    main()
