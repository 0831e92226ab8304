"""ResNet-50 on ImageNet, as in Horovod's example.

    horovodrun -np 8 python imagenet.py --train-dir DIR --val-dir DIR

Elastic training, resume and logs need no line. A test runs it on a few pictures; it was never run
on ImageNet.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torchvision import datasets, models
from torchvision import transforms as T

import hvd_train

parser = ArgumentParser()
parser.add_argument("--train-dir", required=True)
parser.add_argument("--val-dir", required=True)
parser.add_argument("--arch", default="resnet50")
parser.add_argument("--base-lr", type=float, default=0.0125, help="for 32 images a step")
args, config = hvd_train.parse_args(parser, epochs=90, batch_size=32)
finish = T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
train = datasets.ImageFolder(
    args.train_dir, T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *finish])
)
val = datasets.ImageFolder(args.val_dir, T.Compose([T.Resize(256), T.CenterCrop(224), *finish]))
model = models.get_model(args.arch, num_classes=len(train.classes))
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)


def measure(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(1) == labels,
    }


def learning_rate(position, times):  # five epochs up to `times` the base rate, then steps down
    warm_up = 1 + position * (times - 1) / 5
    return args.base_lr * (
        warm_up if position < 5 else times * 0.1 ** sum(position >= e for e in (30, 60, 80))
    )


with hvd_train.Session(model, optimizer, train, config=config) as session:
    for epoch in session.epochs():
        for step in epoch:
            optimizer.param_groups[0]["lr"] = learning_rate(
                step.position, session.global_batch / 32
            )
            for micro in step:
                micro.backward(**measure(model, micro.batch))
        session.keep_best(session.evaluate(val, measure)["accuracy"])
