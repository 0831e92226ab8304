"""Digests of tensors: of their bytes in host memory, or of hashes that a GPU computes."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor, nn

from hvd_train.data.trees import tensors_in
from hvd_train.network.buffers import dense_parts

_WORDS = 1 << 21  # that a GPU hashes at once, in less than 100 MB
_ROUNDS = [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)]


def digest_of(facts: str, tensors: Iterable[tuple[str, Tensor]], *, on_device: bool = False) -> str:
    """Return a digest of 32 hexadecimal digits.

    The tensors' order and memory format do not matter. Their device does not either, unless tensors
    on a GPU are hashed there, `on_device`, which copies nothing to the host.
    """
    fingerprint = xxhash.xxh3_128(facts.encode())
    on_gpu = []
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        fingerprint.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in dense_parts(tensor.detach()):
            if on_device and part.is_cuda:
                on_gpu.append(part)
                continue
            values = part.contiguous().cpu().reshape(-1).view(torch.uint8)
            # without the GIL: the heartbeat's thread runs meanwhile
            fingerprint.update(values.numpy().data)
    if on_gpu:
        fingerprint.update(f"\n{hashes_of(on_gpu)}".encode())
    return fingerprint.hexdigest()


def digest_of_module(module: nn.Module) -> str:
    """Return a digest of the weights and buffers of a module, as `digest_of` does."""
    return digest_of("", tensors_in(module.state_dict()))


def hashes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return hashes of the bytes of all tensors, computed on their device.

    Each is the sum of the hashes of up to two million words with their places, modulo 2^64, so that
    it does not depend on the order of additions. The hash of a word is the last step of SplitMix64
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    hashes = [_hash_of(words) for words in _words_of(tensors)]
    found: list[int] = torch.stack(hashes).tolist() if hashes else []
    return found


def _words_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of all tensors as words of up to 32 bits, [n] int64."""
    waiting: list[Tensor] = []
    num_words = 0
    for tensor in tensors:
        kind = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
        for piece in torch.split(tensor.contiguous().reshape(-1).view(kind), _WORDS):
            if num_words + len(piece) > _WORDS:
                yield torch.cat(waiting)
                waiting = []
                num_words = 0
            waiting.append(piece.long())
            num_words += len(piece)
    if waiting:
        yield torch.cat(waiting)


def _hash_of(words: Tensor) -> Tensor:
    """Return the sum of the hashes of words and their places, [] int64; change the words."""
    places = torch.arange(len(words), device=words.device)
    hashed = words.bitwise_and_(0xFFFFFFFF).bitwise_or_(places << 32)
    for shift, factor in _ROUNDS:
        # torch repeats the sign when it shifts
        hashed ^= (hashed >> shift).bitwise_and_((1 << 64 - shift) - 1)
        hashed *= factor - (1 << 64) if factor >> 63 else factor
    return hashed.sum()
