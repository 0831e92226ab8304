r"""An elastic training as Horovod's documentation has it, for `benchmarks.recovery`:
TorchState and ElasticSampler.

    horovodrun -np 3 --min-np 1 --host-discovery-script ./discover.sh \
        python benchmarks/plain_elastic.py LOG

Rank 0 appends a line of JSON to LOG for each step: time, process, how often this process has
(re)entered, world size.
"""

import json
import os
import sys
import time

import torch
from torch import nn

STEP_S = 0.05


def network(num_classes: int = 10) -> nn.Module:
    """Return a network whose training pass takes `STEP_S` seconds and leaves the cores
    free, as one on a GPU might.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_classes))
    model.register_forward_hook(lambda module, *_: time.sleep(STEP_S) if module.training else None)
    return model


def main() -> None:
    """Train until the process is killed."""
    import horovod.torch as hvd
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    hvd.init()
    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    entries = 0

    @hvd.elastic.run
    def train(state):  # type: ignore[no-untyped-def]  # untyped, as users write it
        nonlocal entries
        entries += 1
        while True:
            for number, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                if hvd.rank() == 0:
                    world = [os.getpid(), entries]
                    line = {"time": time.time(), "world": world, "world_size": hvd.size()}
                    with open(sys.argv[1], "a") as log:
                        print(json.dumps(line), file=log)
                state.sampler.record_batch(number, 20)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))


if __name__ == "__main__":
    main()
