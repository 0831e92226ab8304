"""What a commit costs a training: snapshot, digest and load of the state of a network of torchvision's on a GPU."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torchvision import models

from benchmarks.gpu_check.jobs import answer
from hvd_train.progress.order import Cut
from hvd_train.state import TrainState

TIMES = 5


def trained(name: str) -> TrainState:
    """Return the state after one step of SGD with momentum."""
    model = getattr(models, name)(num_classes=1000).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model, optimizer, torch.amp.GradScaler("cuda"), Cut(64, 64))


def main() -> None:
    """Measure, and look whether a loaded state is the one that was saved."""
    state = trained(sys.argv[1])
    held = torch.cuda.memory_allocated()
    seen: dict[str, Any] = {"snapshot": [], "digest": [], "load": [], "equal": True}
    for _ in range(TIMES):
        before, snapshot = state.digest(), None
        for name in ("snapshot", "digest", "load"):
            torch.cuda.synchronize()
            began = time.perf_counter()
            if name == "snapshot":
                snapshot = state.snapshot()
            elif name == "digest":
                state.digest()
            else:
                with torch.no_grad():
                    for parameter in state.model.parameters():
                        parameter.zero_()
                assert snapshot is not None
                state.load(snapshot)
            torch.cuda.synchronize()
            seen[name].append(time.perf_counter() - began)
        seen["equal"] = seen["equal"] and state.digest() == before
    seen["bytes_on_gpu"], seen["more_at_the_peak"] = held, torch.cuda.max_memory_allocated() - held
    answer(seen)


if __name__ == "__main__":
    main()
