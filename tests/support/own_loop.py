"""A script with a loop of its own, for jobs on hosts: a scheduler, a counter,
evaluations in the middle of epochs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hvd_train
from hvd_train.config import DataConfig
from hvd_train.data import sources
from tests.support.on_demand import obedient


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "right": logits.argmax(1) == labels,
    }


def main() -> None:
    _, config = hvd_train.parse_args(
        epochs=8, batch_size=20, global_batch_size=60, log_steps=1, commit_steps=10
    )
    digits = sources.open_data(DataConfig(), 0)
    train, val = (
        TensorDataset(part.images.float() / 255, part.labels) for part in (digits.train, digits.val)
    )
    model = obedient(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    with hvd_train.Session(model, optimizer, train, config=config) as session:
        own = session.register(scheduler=scheduler, seen=0)
        for epoch in session.epochs():
            for step in epoch:
                for micro in step:
                    micro.backward(**measure(model, micro.batch))
                scheduler.step()
                own.seen += step.scores.count
                if own.seen % 7 == 0:
                    session.evaluate(val, measure, name="middle")
            session.keep_best(session.evaluate(val, measure)["right"])
        assert own.seen == config.schedule.epochs * len(train)


if __name__ == "__main__":
    main()
