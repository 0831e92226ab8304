"""A generator of digits and its discriminator: two optimizers, each with its turn in every step.

horovodrun -np 2 python examples/gan.py

On two cores it takes some 20 seconds. At its end the discriminator is unsure (its loss is near 2 log 2 = 1.39), and
digits.png in the current folder has 64 made digits. Under train_elastic.sh workers may come and go meanwhile:

horovodrun_scripts/train_elastic.sh -- python examples/gan.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.utils import save_image

import hvd_train

NOISE = 16


def noise(count: int, device: torch.device) -> Tensor:
    """Return what the generator makes `count` images of."""
    return torch.randn(count, NOISE, device=device)


def main() -> None:
    """Train, and write a picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().images).float().flatten(1) / 8 - 1
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    models = {"generator": generator, "discriminator": discriminator}
    optimizers = {
        "d": torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        "g": torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    }

    settings = {"epochs": args.epochs, "global_batch_size": 64, "batch_size": 32}
    with hvd_train.session(models, optimizers, images, **settings) as session:
        for step in session:
            with step:
                for slot in step.slots("d"):
                    made = generator(noise(len(slot), session.device))
                    of_made, of_real = discriminator(made), discriminator(slot.data)
                    slot.backward(F.softplus(of_made).mean() + F.softplus(-of_real).mean())
                step.finish("d")
                for slot in step.slots("g"):
                    made = generator(noise(len(slot), session.device))
                    slot.backward(F.softplus(-discriminator(made)).mean())
                step.finish("g")

    with torch.no_grad():
        made = generator.eval()(noise(64, session.device))
    if session.place.rank == 0:
        save_image(made.view(64, 1, 8, 8) / 2 + 0.5, "digits.png")


if __name__ == "__main__":
    main()
