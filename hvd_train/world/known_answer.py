"""A computation in whole numbers, whose results any sound processor or GPU gives to the bit."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvd_train.console import say
from hvd_train.errors import RankDiffers

# All products and sums are whole numbers that the format holds (fp32 up to 2^24, fp16 up to 2^11),
# so the order of additions changes nothing, and TF32 and bf16 hold the inputs as well. Each has the
# format, the largest input, and the digest of the results. CPUs train in fp32.
ANSWERS = [
    (torch.float32, 127, "f7086beff2215a40"),
    (torch.float16, 1, "349a86c2c71b3276"),
]
_RIGHT = {"cpu": ANSWERS[0][2], "cuda": " ".join(right for _, _, right in ANSWERS)}


def check(device: torch.device, host: str) -> None:
    """Raise RankDiffers if the CPU of this rank, on this host, computes wrongly; for a GPU print
    a line.
    """
    if is_right(device):
        return
    # No GPU has run this yet. If its libraries rounded whole numbers, no job would start.
    if device.type == "cuda":
        say(problem(device, host))
        return
    raise RankDiffers(problem(device, host))


def problem(device: torch.device, host: str) -> str:
    """Return what to tell the user of a host whose device computes wrongly."""
    return (
        f"{host} computes wrongly ({device}): convolutions and products of whole numbers have "
        "other results than they must; leave it out (--recheck-steps 0 trains without a check)"
    )


def is_right(device: torch.device) -> bool:
    """Return whether a device gives the right results, on a GPU also in half precision."""
    return answer_of(device) == _RIGHT[device.type]


def answer_of(device: torch.device) -> str:
    """Return the digests of the results that a device gives, on a GPU also in half precision."""
    answers = ANSWERS if device.type == "cuda" else ANSWERS[:1]
    return " ".join(digest(device, dtype, largest) for dtype, largest, _ in answers)


def wrong_ranks(devices: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Return the ranks with other answers than sound devices of the same kind.

    Both are by rank: the name of the device, and what `answer_of` returned. The right answer is
    sound, or if no device of a kind gives it, what most of them give.
    """
    wrong = []
    for kind in dict.fromkeys(devices):
        ranks = [rank for rank, device in enumerate(devices) if device == kind]
        of_kind = Counter(answers[rank] for rank in ranks)
        usual, count = of_kind.most_common(1)[0]
        sound = of_kind.keys() & _RIGHT.values()
        if not sound and 2 * count > len(ranks):
            sound = {usual}
        if sound:
            wrong += [rank for rank in ranks if answers[rank] not in sound]
    return wrong


def digest(device: torch.device, dtype: torch.dtype, largest: int) -> str:
    """Return a digest of what `computed` returns, also if a program has set other modes."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        results = b"".join(_bytes_of(each) for each in computed(device, dtype, largest))
    return hashlib.blake2b(results, digest_size=8).hexdigest()


def computed(device: torch.device, dtype: torch.dtype, largest: int) -> list[Tensor]:
    """Return a convolution, a product of matrices and their gradients."""
    random = np.random.Philox(0)  # its numbers are the same in any version of numpy

    def numbers(*shape: int) -> Tensor:
        values = random.random_raw(shape) % (2 * largest + 1)
        return torch.from_numpy(values.astype(np.int64) - largest).to(device, dtype)

    inputs = [numbers(8, 4, 17, 17), numbers(16, 4, 3, 3), numbers(64, 256), numbers(256, 64)]
    images, kernels, rows, columns = [each.requires_grad_() for each in inputs]
    # Fast algorithms (Winograd), which round, are for strides of 1.
    results = [functional.conv2d(images, kernels, stride=2), rows @ columns]
    # as `grad_outputs` the factors would make torch import sympy
    weighted = [(each * numbers(*each.shape)).sum() for each in results]
    return [*results, *torch.autograd.grad(weighted[0] + weighted[1], inputs)]


def _bytes_of(tensor: Tensor) -> bytes:
    # -0.0 becomes 0.0
    found: bytes = (tensor.detach() + 0.0).cpu().contiguous().numpy().tobytes()
    return found
