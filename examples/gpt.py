"""A small GPT on the bytes of a text: horovodrun -np 2 python gpt.py TEXT.

It also trains on tokens: python gpt.py TOKENS --dtype uint16 --vocabulary 50257, with a file that a
tokenizer's numbers were written to, as by numpy.array(numbers, "uint16").tofile("TOKENS").

The last tenth of the file is for validation. On the help of Python (466 KB) it takes two minutes on
two CPU cores, and reaches a loss of 2.3 for each byte. This writes the help of Python:

    python -c "from pydoc_data.topics import topics; print(*topics.values())"
"""

import math
from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

import hvd_train

parser = ArgumentParser()
parser.add_argument("text")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--block", type=int, default=128, help="tokens of a sequence")
parser.add_argument("--dtype", default="uint8", help="of the tokens in the file; uint8: bytes")
parser.add_argument("--vocabulary", type=int, default=256, help="tokens are below this number")
args, config = hvd_train.parse_args(
    parser, epochs=5, batch_size=16, global_batch_size=64, clip_norm=1.0
)


tokens = hvd_train.Tokens(args.text, args.block, args.dtype)
if len(tokens) < 2:
    parser.error(f"{args.text} is shorter than two sequences of {args.block} tokens")
cut = len(tokens) * 9 // 10
train, val = Subset(tokens, range(cut)), Subset(tokens, range(cut, len(tokens)))


class GPT(nn.Module):
    def __init__(self, vocabulary, width, layers, block):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)  # the table of tokens also gives the logits
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
            self.tokens(tokens) + self.places(places), mask=self.mask, is_causal=True
        )
        return found @ self.tokens.weight.T


def learning_rate(position):  # up in the first tenth of the run, then down as a cosine
    done = position / config.schedule.epochs
    return args.lr * (
        done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))
    )


def measure(model, batch):
    tokens, following = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="none")
    return {"loss": losses.view(following.shape).mean(1)}


model = GPT(args.vocabulary, args.width, args.layers, args.block)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
with hvd_train.Session(model, optimizer, train, config=config) as session:
    for epoch in session.epochs():
        for step in epoch:
            optimizer.param_groups[0]["lr"] = learning_rate(step.position)
            for micro in step:
                micro.backward(**measure(model, micro.batch))
        session.keep_best(session.evaluate(val, measure)["loss"], higher=False)
