"""Gradients after a broken step, with the hooks of the installed Horovod."""

import os
import subprocess
import sys

import pytest

# A world of one in which Horovod reduces gradients as with more ranks, as it does in elastic jobs.
PROGRAM = """
import os
import horovod.torch as hvd
import torch
from torch import nn
from hvd_train.world import buckets
from hvd_train.world.horovod_world import HorovodWorld

buckets._BUCKET_BYTES = 80  # a layer
world = HorovodWorld()
os.environ["HOROVOD_ELASTIC"] = "1"
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
grouped = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
own = world._optimizers[grouped]
sent, start = [], own._start_sum
own._start_sum = lambda tensor, name: (sent.append(name), start(tensor, name))[1]

def begin(passes):
    model.zero_grad(set_to_none=True)
    world.expect_passes(grouped, passes)

def reduced():
    with world.reduced(grouped):
        found = list(sent)
    sent.clear()
    return found

# Buckets are sent after the last expected pass; gradients that no pass has reached are sent as zeros.
begin(2)
model(torch.ones(1, 3)).sum().backward()
assert sent == [], sent
model[1](torch.ones(1, 4)).sum().backward()
assert sent == ["1.bias"], sent
assert reduced() == ["1.bias", "0.bias"]

def break_step():
    for handle, _ in grouped._handles.values():
        hvd.synchronize(handle)  # as after a fault; otherwise its name may still be in use
    sent.clear()

# A step that broke leaves nothing behind: no bucket that was sent, no count of gradients or of passes.
begin(2)
model(torch.ones(1, 3)).sum().backward()
model[1](torch.ones(1, 4)).sum().backward()
model[0].bias.sum().backward()
break_step()
begin(2)
model(torch.ones(1, 3)).sum().backward()
model[0].bias.sum().backward()
assert sent == [], sent
model[1](model[0].weight.sum().expand(1, 4)).sum().backward()
expected = [parameter.grad.clone() for parameter in model.parameters()]
assert reduced() == ["1.bias", "0.bias"]
assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))

# Parameters that are all frozen for a time are reduced again later.
for trained in (False, True):
    model.requires_grad_(trained)
    world.regroup(grouped)
begin(1)
model(torch.ones(1, 3)).sum().backward()
assert reduced() == ["1.bias", "0.bias"]

world.close()
print("done")
"""


@pytest.mark.timeout(300)
def test_a_broken_step_leaves_nothing_behind() -> None:
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
