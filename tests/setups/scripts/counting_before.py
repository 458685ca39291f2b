"""Micro-batches, padded, whose targets are counted before any of them is run, by a tensor.

--of-each divides the loss of each by its own targets and the number of micro-batches; --dynamic pads each to
a width of its own, and --bf16 computes them in bfloat16.
"""

import argparse

import torch
import torch.nn.functional as F
from models import Decoder, text

PAD, WIDTHS = 0, (9, 11, 13, 15)

parser = argparse.ArgumentParser()
parser.add_argument("--of-each", action="store_true")
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--bf16", action="store_true")
asked = parser.parse_args()


def padded(seed, length):
    """Three rows of two tokens less than a length, padded to it or to the largest."""
    ids = text(3, length if asked.dynamic else max(WIDTHS), seed)
    ids[:, length - 2 :] = PAD
    return ids


def targets_in(window):
    return sum((ids[:, 1:] != PAD).sum() for ids in window)


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    window = [padded(4 * step + i, length) for i, length in enumerate(WIDTHS)]
    targets = targets_in(window)
    for ids in window:
        with torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16):
            logits = model(ids[:, :-1]).flatten(0, 1)
            total = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        count = targets_in([ids]) * len(window) if asked.of_each else targets
        (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()
