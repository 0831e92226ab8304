"""Buckets of gradients, with the hooks of the installed Horovod."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from hvd_train.world.buckets import in_buckets

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

world.close()
print("done")
"""


@pytest.mark.parametrize(
    ("megabytes", "expected"),
    [
        ([1, 1, 1], [[1, 1, 1]]),
        ([1, 2, 3, 20, 10, 9], [[9, 10, 20], [3], [2, 1]]),
        ([400, 1, 2], [[2, 1, 400]]),
        ([3, 400, 1, 2], [[2, 1, 400], [3]]),
    ],
)
def test_buckets_begin_with_the_last_layer(megabytes: list[int], expected: list[list[int]]) -> None:
    """They hold 25 MB, or whole parameters of more; the last that is sent holds at most 4 MB."""
    parameters = [nn.Parameter(torch.empty(size * 2**18, device="meta")) for size in megabytes]
    assert [[len(p) // 2**18 for p in bucket] for bucket in in_buckets(parameters)] == expected


def test_a_gradient_is_a_view_of_its_bucket() -> None:
    """It has the strides of its parameter; types do not mix; a missing gradient is zeros."""
    weight = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    bias, double = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5, dtype=torch.float64))
    first, second = in_buckets([weight, bias, double])
    second.place(torch.zeros(second.num_bytes, dtype=torch.uint8))
    assert ([*first], [*second]) == ([double], [bias, weight])
    weight.grad = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    expected = weight.grad.clone()
    second.fill()
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, expected)
    assert torch.equal(bias.grad, torch.zeros(3))
    second.flat += 1
    assert torch.equal(weight.grad, expected + 1)


@pytest.mark.timeout(300)
def test_a_broken_step_leaves_nothing_behind() -> None:
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
