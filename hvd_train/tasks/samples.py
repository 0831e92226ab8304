"""Small data and networks for tasks other than classification, of what each
machine has: for four recipes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from hvd_train.config import DataConfig
from hvd_train.data.sources import file_of_scikit_learn, open_data
from hvd_train.data.tokens import Tokens

Parts = tuple[TensorDataset, TensorDataset]  # for training and validation
_VALIDATION = 5  # one item of so many
_WINDOW = 128  # tokens
_WIDTH = 128  # of the network for them
_LAYERS = 4


def diabetes(config: DataConfig) -> Parts:
    """Return 442 patients: ten measurements, and how their disease goes on in a
    year (Efron et al., 2004).
    """
    inputs = np.loadtxt(file_of_scikit_learn("diabetes_data_raw.csv.gz"))
    targets = np.loadtxt(file_of_scikit_learn("diabetes_target.csv.gz"))
    patients = torch.from_numpy((inputs - inputs.mean(0)) / inputs.std(0)).float()
    return _divided(patients, torch.from_numpy(targets / 100).float())


def perceptron() -> nn.Module:
    """Return a network of ten measurements: [n, 10] to [n, 1]."""
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


def digit_masks(config: DataConfig) -> Parts:
    """Return scanned digits whose bright pixels have the class of the digit, the
    others the class "paper".
    """
    digits: Any = open_data(DataConfig(), 0).train
    images = digits.images.float() / 255
    labels = digits.labels
    masks = torch.where(images[:, 0] > 0.4, labels[:, None, None] + 1, 0)
    return _divided(images, masks, ("paper", *map(str, range(10))))


def pixel_network(num_classes: int) -> nn.Module:
    """Return a network of each pixel's class: images [n, 1, 8, 8] to
    logits [n, num_classes, 8, 8].
    """
    layers = []
    for before, dilation in ((1, 1), (32, 2), (32, 4), (32, 1)):
        layers += [
            nn.Conv2d(before, 32, 3, padding=dilation, dilation=dilation),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(32, num_classes, 1))


def python_topics(config: DataConfig) -> Parts:
    """Return the help of Python in sequences of 64 bytes, and for each
    byte the one that follows.
    """
    from pydoc_data import topics

    text = "\n".join(topics.topics.values()).encode()
    rows = (
        torch.frombuffer(bytearray(text[: len(text) // 64 * 64]), dtype=torch.uint8)
        .long()
        .view(-1, 64)
    )
    return _divided(rows[:, :-1], rows[:, 1:])


class ByteModel(nn.Module):
    """Predicts the next byte: [n, length] to logits [n, length, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 64)
        self.memory = nn.GRU(64, 128, batch_first=True)
        self.following = nn.Linear(128, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each byte's successor."""
        logits: Tensor = self.following(self.memory(self.bytes(text))[0])
        return logits


def token_files(config: DataConfig) -> tuple[Subset[Any], Subset[Any]]:
    """Return windows of the tokens in train.bin and val.bin of `data_dir` (uint16).

    Without it tokens are the bytes of a file with Python's help. Raises UsageError.
    """
    if config.data_dir is None:
        from pydoc_data import topics

        files: list[Any] = [Tokens(topics.__file__, _WINDOW, "uint8")]
        cut = len(files[0]) * 9 // 10
    else:
        files = [Tokens(config.data_dir / f"{part}.bin", _WINDOW) for part in ("train", "val")]
        cut = len(files[0])
    train = Subset(files[0], range(cut))
    val = Subset(files[-1], range(cut if len(files) == 1 else 0, len(files[-1])))
    # a model has as many logits
    train.classes = range(1 + max(tokens.largest for tokens in files))  # type: ignore[attr-defined]
    return train, val


class GPT(nn.Module):
    """Predicts the next token: [n, length] to logits [n, length, vocabulary]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_classes, _WIDTH)
        self.places = nn.Embedding(_WINDOW, _WIDTH)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)  # the table of tokens also gives the logits
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _WIDTH // 32, 4 * _WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, _LAYERS, nn.LayerNorm(_WIDTH), enable_nested_tensor=False
        )

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each token's successor."""
        length = text.shape[1]
        places = self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, text.device)
        found = self.layers(self.tokens(text) + places, mask=mask, is_causal=True)
        logits: Tensor = found @ self.tokens.weight.T
        return logits


def _divided(inputs: Tensor, targets: Tensor, classes: tuple[str, ...] = ()) -> Parts:
    is_val = torch.arange(len(inputs)) % _VALIDATION == 0
    train, val = (TensorDataset(inputs[part], targets[part]) for part in (~is_val, is_val))
    train.classes = classes  # type: ignore[attr-defined]  # as torchvision's data sets have them
    return train, val
