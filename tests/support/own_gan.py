"""A script that trains two networks against each other, for jobs on hosts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hvd_train
from hvd_train.config import DataConfig
from hvd_train.data import sources
from tests.support.on_demand import come_to, obedient
from tests.support.worlds import own_generator


def main() -> None:
    _, config = hvd_train.parse_args(epochs=8, batch_size=20, global_batch_size=60, log_steps=1, commit_steps=10)
    digits = sources.open_data(DataConfig(), 0).train
    maker = own_generator(nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 64)))
    models = {"maker": maker, "critic": obedient(1)}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for name, each in models.items()}

    def fakes(micro: hvd_train.loops.MicroBatch) -> Tensor:
        made: Tensor = maker(torch.randn(len(micro), 8)).sigmoid()
        return made.view(-1, 1, 8, 8)

    def losses(images: Tensor, real: float) -> Tensor:
        logits = models["critic"](images).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="none")

    train = TensorDataset(digits.images.float() / 255)
    with hvd_train.Session(models, optimizers, train, config=config) as session:
        own = session.register(seen=0)
        for step in session.steps():
            for _ in range(1 + own.seen % 2):
                for micro in (update := step.update("critic")):
                    come_to("critic")
                    micro.backward(losses(micro.batch[0], 1.0) + losses(fakes(micro).detach(), 0.0))
                own.seen += update.scores.count
            for micro in step.update("maker"):
                come_to("maker")
                micro.backward(losses(fakes(micro), 1.0))
            own.seen += 1


if __name__ == "__main__":
    main()
