"""A DCGAN, as in PyTorch's example: horovodrun -np 4 python dcgan.py --data-dir DIR.

DIR has folders of pictures, such as CelebA in one folder. Each epoch writes a sheet of pictures
into the run folder. A test trains it on a few pictures; on 128 of them, 25 epochs take 40 s on two
CPU cores. It was never run on CelebA.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets
from torchvision import transforms as T
from torchvision.utils import save_image

import hvd_train

NOISE = 100
parser = ArgumentParser()
parser.add_argument("--data-dir", required=True)
parser.add_argument("--width", type=int, default=64, help="channels of the widest pictures")
args, config = hvd_train.parse_args(parser, epochs=25, batch_size=64)
side = T.Resize(64), T.CenterCrop(64), T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)
pictures = datasets.ImageFolder(args.data_dir, T.Compose(side))


def stage(kind, before, after, stride, padding, activation):
    return kind(before, after, 4, stride, padding, bias=False), nn.BatchNorm2d(after), activation


def generator(w):
    up = nn.ConvTranspose2d
    return nn.Sequential(
        *stage(up, NOISE, 8 * w, 1, 0, nn.ReLU()),  # 4 x 4 pixels
        *stage(up, 8 * w, 4 * w, 2, 1, nn.ReLU()),
        *stage(up, 4 * w, 2 * w, 2, 1, nn.ReLU()),
        *stage(up, 2 * w, w, 2, 1, nn.ReLU()),
        *(up(w, 3, 4, 2, 1, bias=False), nn.Tanh()),  # 64 x 64
    ).apply(first_weights)


def discriminator(w):
    down, leaky = nn.Conv2d, nn.LeakyReLU(0.2)
    return nn.Sequential(
        *(down(3, w, 4, 2, 1, bias=False), leaky),
        *stage(down, w, 2 * w, 2, 1, leaky),
        *stage(down, 2 * w, 4 * w, 2, 1, leaky),
        *stage(down, 4 * w, 8 * w, 2, 1, leaky),
        *(down(8 * w, 1, 4, 1, 0, bias=False), nn.Flatten(0)),
    ).apply(first_weights)


def first_weights(layer):
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(layer.weight, 0.0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)


makes, judges = generator(args.width), discriminator(args.width)
models = {"generator": makes, "discriminator": judges}
optimizers = {
    name: torch.optim.Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for name, each in models.items()
}


def fakes(micro):  # the first update of each optimizer in a step draws the same random numbers
    return makes(torch.randn(len(micro), NOISE, 1, 1, device=session.device))


def losses(images, real):
    logits = judges(images)
    return F.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, real), reduction="none"
    )


with hvd_train.Session(models, optimizers, pictures, config=config) as session:
    fixed = torch.randn(64, NOISE, 1, 1, generator=torch.Generator().manual_seed(0)).to(
        session.device
    )
    for epoch in session.epochs():
        for step in epoch:
            for micro in step.update("discriminator"):
                real = losses(micro.batch[0], 1.0)
                micro.backward(real + losses(fakes(micro).detach(), 0.0), real=real)
            for micro in step.update("generator"):
                micro.backward(losses(fakes(micro), 1.0))
        with session.aside() as writes:
            if writes:
                save_image(
                    makes(fixed), session.run_dir / f"fakes-{epoch.number:03}.png", normalize=True
                )
