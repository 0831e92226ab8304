"""PyTorch's ImageNet example: horovodrun -np 8 python pytorch_imagenet.py DIR --arch resnet50.

DIR has train/ and val/ with a folder for each class. A test trains it on a few pictures; never run
on ImageNet.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torchvision import datasets, models
from torchvision import transforms as T

import hvd_train

parser = ArgumentParser()
parser.add_argument("data")
parser.add_argument("--arch", default="resnet18")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=1e-4)
parser.add_argument("--pretrained", action="store_true")
args, config = hvd_train.parse_args(parser, epochs=90, batch_size=None, global_batch_size=256)
finish = T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
varied = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *finish])
train = datasets.ImageFolder(f"{args.data}/train", varied)
val = datasets.ImageFolder(
    f"{args.data}/val", T.Compose([T.Resize(256), T.CenterCrop(224), *finish])
)
model = models.get_model(args.arch, weights="DEFAULT" if args.pretrained else None)
optimizer = torch.optim.SGD(
    model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)


def measure(model, batch):
    images, labels = batch
    logits = model(images)
    hits = logits.topk(5).indices == labels[:, None]
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "top1": hits[:, 0],
        "top5": hits.any(1),
    }


with hvd_train.Session(model, optimizer, train, config=config) as session:
    session.register(scheduler=scheduler)
    for epoch in session.epochs():
        for step in epoch:
            for micro in step:
                micro.backward(**measure(model, micro.batch))
        session.keep_best(session.evaluate(val, measure)["top1"])
        scheduler.step()
