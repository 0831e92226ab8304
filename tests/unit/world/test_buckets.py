"""Gradients after a broken step, with the hooks of the installed Horovod."""

import os
import subprocess
import sys

import pytest

# A world of one that takes itself for a part of one of two, with Horovod's hooks of elastic jobs.
PROGRAM = """
import os
import horovod.torch as hvd
import torch
from torch import nn
from hvd_train.world.horovod_world import HorovodWorld
from hvd_train.world.world import Place

world = HorovodWorld()
world.place = Place(0, 2)
os.environ["HOROVOD_ELASTIC"] = "1"
SIZE = 2600  # a layer is larger than a bucket
model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
sent, begun, start = [], [], hvd.grouped_allreduce_async_

def recorded(tensors, name, **options):
    sent.append(name)
    begun.append(start(tensors, name=name, **options))
    return begun[-1]

hvd.grouped_allreduce_async_ = recorded
world.wrap(model)

def begin(passes):
    model.zero_grad(set_to_none=True)
    world.begin_update([parameter for parameter in model.parameters() if parameter.requires_grad], passes)

def reduced():
    world.reduce()
    found = list(sent)
    sent.clear()
    begun.clear()
    return found

# Buckets are sent after the last expected pass; gradients that no pass has reached are sent as zeros.
begin(2)
model(torch.ones(1, SIZE)).sum().backward()
assert sent == [], sent
model[1](torch.ones(1, SIZE)).sum().backward()
assert sent == ["1.bias"], sent
assert reduced() == ["1.bias", "0.bias"]

def break_step():
    while begun:
        hvd.synchronize(begun.pop())  # as after a fault; otherwise its name may still be in use
    sent.clear()

# A step that broke leaves nothing behind: no bucket that was sent, no count of gradients or of passes.
begin(2)
model(torch.ones(1, SIZE)).sum().backward()
model[1](torch.ones(1, SIZE)).sum().backward()
model[0].bias.sum().backward()
break_step()
begin(2)
model(torch.ones(1, SIZE)).sum().backward()
model[0].bias.sum().backward()
assert sent == [], sent
model[1](model[0].weight.sum().expand(1, SIZE)).sum().backward()
expected = [parameter.grad.clone() for parameter in model.parameters()]
assert reduced() == ["1.bias", "0.bias"]
assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))

# Other parameters may be trained in each update, also new ones of new layers.
for trained, names in (("1.", ["1.bias"]), ("", ["1.bias", "0.bias"]), ("0.", ["0.bias"])):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    begin(1)
    model(torch.ones(1, SIZE)).sum().backward()
    assert reduced() == names
model.append(nn.Linear(SIZE, SIZE)).requires_grad_()
begin(1)
model(torch.ones(1, SIZE)).sum().backward()
assert sent == ["2.bias", "1.bias", "0.bias"]
reduced()

# In each world the ranks agree anew on the parameters without a gradient: a newcomer does not know them.
asked, gather = [], world.gather
world.gather = lambda value: (asked.append(value), gather(value))[1]
for moves, agrees in ((False, True), (False, False), (True, True)):
    if moves:
        world.unwrap()  # as a newcomer begins
        world.wrap(model)
    begin(1)
    model[:2](torch.ones(1, SIZE)).sum().backward()
    reduced()
    assert (isinstance(asked[0], list) if asked else False) == agrees, asked
    assert model[2].weight.grad is None
    asked.clear()

world.close()
print("done")
"""  # noqa: E501


@pytest.mark.timeout(300)
def test_a_broken_step_leaves_nothing_behind() -> None:
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
