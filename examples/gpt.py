"""A small GPT on the bytes of a text: horovodrun -np 2 python gpt.py TEXT.

The last tenth of TEXT is for validation. On the help of Python (466 KB) it takes two minutes on two
CPU cores, and reaches a loss of 2.3 for each byte. This writes the help of Python:

    python -c "from pydoc_data.topics import topics; print(*topics.values())"
"""

import math
import os
from argparse import ArgumentParser

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

import hvd_train

parser = ArgumentParser()
parser.add_argument("text")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--block", type=int, default=128, help="bytes of a sequence")
args, config = hvd_train.parse_args(
    parser, epochs=5, batch_size=16, global_batch_size=64, clip_norm=1.0
)


class Bytes(Dataset):
    """Sequences of `block` bytes, and for each byte the one that follows; an
    epoch has each sequence once.
    """

    def __init__(self, path, block):
        self.path, self.block = path, block

    def __len__(self):
        return (os.path.getsize(self.path) - 1) // self.block

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        found = np.fromfile(self.path, np.uint8, self.block + 1, offset=index * self.block)
        tokens = torch.from_numpy(found.astype(np.int64))
        return tokens[:-1], tokens[1:]


tokens = Bytes(args.text, args.block)
if len(tokens) < 2:
    parser.error(f"{args.text} is shorter than two sequences of {args.block} bytes")
cut = len(tokens) * 9 // 10
train, val = Subset(tokens, range(cut)), Subset(tokens, range(cut, len(tokens)))


class GPT(nn.Module):
    def __init__(self, width, layers, block):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(block, width)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)  # the table of bytes also gives the logits
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(block), persistent=False
        )

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        found = self.layers(
            self.bytes(tokens) + self.places(places), mask=self.mask, is_causal=True
        )
        return found @ self.bytes.weight.T


def learning_rate(position):  # up in the first tenth of the run, then down as a cosine
    done = position / config.schedule.epochs
    return args.lr * (
        done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))
    )


def measure(model, batch):
    tokens, following = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="none")
    return {"loss": losses.view(following.shape).mean(1)}


model = GPT(args.width, args.layers, args.block)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
with hvd_train.Session(model, optimizer, train, config=config) as session:
    for epoch in session.epochs():
        for step in epoch:
            optimizer.param_groups[0]["lr"] = learning_rate(step.position)
            for micro in step:
                micro.backward(**measure(model, micro.batch))
        session.keep_best(session.evaluate(val, measure)["loss"], higher=False)
