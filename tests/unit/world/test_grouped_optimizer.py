"""The groups of gradients, and what they rely on in Horovod's optimizer, against the Horovod that is installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvd_train import world
from hvd_train.world.grouped_optimizer import HorovodOptimizer, fusion_groups

ROOM = Path(world.__file__).parent
# A world of one in which Horovod reduces gradients as with more ranks, as it does in elastic jobs.
WORLD_OF_ONE = """
import inspect, os, typing
import horovod.torch as hvd
import torch
from torch import nn
from hvd_train.world.grouped_optimizer import GroupedOptimizer, HorovodOptimizer
from hvd_train.world.horovod_world import HorovodWorld
from hvd_train.world.world import Reduction

world = HorovodWorld()
os.environ["HOROVOD_ELASTIC"] = "1"
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
plain = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def in_a_world_of_one(program: str) -> str:
    """Run a program after `WORLD_OF_ONE`, in a process of its own, and return what it prints."""
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    command = [sys.executable, "-c", WORLD_OF_ONE + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def private_attributes(module: Path) -> set[str]:
    """The attributes with one leading underscore that a module touches of objects other than its own."""
    attributes = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Attribute)]
    private = [node for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")]
    return {node.attr for node in private if ast.unparse(node.value) not in ("self", "os", "torch")}


def test_one_module_touches_private_attributes_of_horovod() -> None:
    """Each of them stands in the protocol that says what it is, and none stands there in vain."""
    touched = {path.stem: private_attributes(path) for path in ROOM.glob("*.py")}
    declared = {name for name in HorovodOptimizer.__annotations__ if name.startswith("_")}
    assert {module: names for module, names in touched.items() if names} == {"grouped_optimizer": declared}


@pytest.mark.timeout(120)
def test_the_installed_horovod_has_what_is_relied_on() -> None:
    """Attributes of the declared types, and methods with the declared parameters."""
    program = """
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), op=hvd.Sum)
for name, hint in typing.get_type_hints(HorovodOptimizer).items():
    value = getattr(optimizer, name)
    if name == "_groups":
        assert value is None, value
    elif name == "_grouped_allreduce_grad_async":
        assert len(inspect.signature(value).parameters) == 1
    else:
        assert isinstance(value, typing.get_origin(hint) or hint), (name, value)
methods = [name for name, value in vars(HorovodOptimizer).items() if inspect.isfunction(value) and name[0] != "_"]
assert len(methods) == 3, methods
for name in methods:
    signatures = [inspect.signature(getattr(owner, name)) for owner in (HorovodOptimizer, type(optimizer))]
    declared, installed = (list(signature.parameters) for signature in signatures)
    assert declared == installed, (name, installed)
assert optimizer._requires_update == set(model.parameters())
"""
    in_a_world_of_one(program)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("wire", "tensors"), [("None", 2), ("torch.float16", 1), ("torch.bfloat16", 1)])
def test_the_hooks_of_the_installed_horovod_send_whole_groups(wire: str, tensors: int) -> None:
    """After the last expected pass, with the piggybacked tensor; what the pass did not reach is sent as zeros.

    Two gradients of a group that travel in another format are one tensor, and so are those of any other group.
    """
    program = """
sent = []

def as_sent(gradient):
    return gradient.clone() if wire is None else gradient.to(wire).float()

grouped = world.wrap(plain, model, Reduction(groups=2, wire=wire))
own = world._optimizers[grouped]
start = own._start_sums
own._start_sums = lambda tensors, name: (sent.append((name, len(tensors))), start(tensors, name))[1]
def alone(parameter):
    raise AssertionError("a gradient travels with its group, on every rank and once")
grouped._allreduce_grad_async = alone
world.expect_passes(grouped, 2)
carried = torch.tensor([1.0, 2.0])
model(torch.ones(1, 3)).sum().backward()
assert sent == [], sent
wait = world.sum_with_gradients(grouped, carried)
model[1](torch.ones(1, 4)).sum().backward()
assert sent == [("1.bias", tensors + 1)], sent
expected = [as_sent(parameter.grad) for parameter in model.parameters()]
with world.reduced(grouped):
    assert sent == [("1.bias", tensors + 1), ("0.bias", tensors)], sent
    assert wait().tolist() == [1.0, 2.0]
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))
    grouped.step()

def break_step():
    for handle, _ in grouped._handles.values():
        hvd.synchronize(handle)  # the fault has ended it: else its name is taken while the machine is busy
    own.forget_step()

# A step that broke leaves nothing behind: no group that was sent, no count of gradients or of passes.
model(torch.ones(1, 3)).sum().backward()
model[1](torch.ones(1, 4)).sum().backward()
model[0].bias.sum().backward()
break_step()
model.zero_grad(set_to_none=True)
sent.clear()
model(torch.ones(1, 3)).sum().backward()
assert sent == [], sent
model[0].bias.sum().backward()
assert sent == [], sent
model[1](model[0].weight.sum().expand(1, 4)).sum().backward()
assert [name for name, _ in sent] == ["1.bias", "0.bias"], sent
expected = [as_sent(parameter.grad) for parameter in model.parameters()]
with world.reduced(grouped):
    assert len(sent) == 2, sent
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))

# Nor where the next step does not reach what the broken one has sent.
for _ in range(2):
    model(torch.ones(1, 3)).sum().backward()
assert len(grouped._handles) == 2
break_step()
model.zero_grad(set_to_none=True)
sent.clear()
for _ in range(2):
    model[1](torch.ones(1, 4)).sum().backward()
with world.reduced(grouped):
    assert [name for name, _ in sent] == ["1.bias", "0.bias"], sent
    assert model[0].weight.grad.tolist() == [[0.0] * 3] * 4

# With fewer passes than before, the hooks send as early as they can.
sent.clear()
model.zero_grad(set_to_none=True)
world.expect_passes(grouped, 1)
model[1](torch.ones(1, 4)).sum().backward()
assert [name for name, _ in sent] == ["1.bias"], sent
with world.reduced(grouped):
    assert [name for name, _ in sent] == ["1.bias", "0.bias"], sent
    assert model[0].weight.grad.tolist() == [[0.0] * 3] * 4

# Only what is trained travels.
for parameter in model[0].parameters():
    parameter.requires_grad_(False)
    parameter.grad = None
world.regroup(grouped)
sent.clear()
model(torch.ones(1, 3)).sum().backward()
with world.reduced(grouped):
    pass
assert sent == [("1.bias", tensors)], sent
assert model[0].weight.grad is None
world.close()
print("done")
"""
    assert in_a_world_of_one(f"wire, tensors = {wire}, {tensors}\n{program}") == "done\n"


def test_groups_come_in_the_order_of_a_backward_pass() -> None:
    """The last parameter first, every parameter once, in groups of about the same size."""
    parameters = [torch.zeros(size) for size in (4, 4, 2, 2, 4)]
    groups = fusion_groups(parameters, 2)
    assert [id(parameter) for group in groups for parameter in group] == [id(p) for p in reversed(parameters)]
    assert [sum(parameter.numel() for parameter in group) for group in groups] == [8, 8]


def test_many_groups_are_one_for_each_parameter_and_small_models_are_one_group() -> None:
    """Without a number, a group holds about 25 MB."""
    parameters = [torch.zeros(3) for _ in range(5)]
    assert [len(group) for group in fusion_groups(parameters, 100)] == [1] * 5
    assert [len(group) for group in fusion_groups(parameters)] == [5]
    large = [torch.empty(15 * 2**18) for _ in range(4)]  # 15 MiB each
    assert [len(group) for group in fusion_groups(large)] == [2, 2]
    assert fusion_groups([]) == []


def test_the_last_group_is_small() -> None:
    """Nothing is left to compute while it travels: 4 MB at most, unless a parameter is larger, or a number is asked."""
    million = 2**18  # numbers in 1 MiB
    network = [torch.empty(size * million) for size in (1, 1, 3, 9, 16, 25)]  # in MiB
    assert [len(group) for group in fusion_groups(network)] == [1, 2, 1, 2]
    assert [len(group) for group in fusion_groups(network, 2)] == [2, 4]
    large_first = [torch.empty(size * million) for size in (5, 1, 25)]
    assert [len(group) for group in fusion_groups(large_first)] == [1, 2]
