"""Micro-batches of several lengths; the loss of each is divided by the targets of the whole window.

--of-each divides by its own targets and the number of micro-batches; --by float, int or numpy says how the
count leaves torch.
"""

import argparse

import torch
import torch.nn.functional as F
from models import WORDS, Decoder, text

parser = argparse.ArgumentParser()
parser.add_argument("--of-each", action="store_true")
parser.add_argument("--by", default="item")
asked = parser.parse_args()


def number(count):
    """The count as a number of Python."""
    if asked.by == "item":
        return max(count.item(), 1)
    if asked.by == "float":
        return max(float(count), 1.0)
    if asked.by == "int":
        return int(count)
    return torch.tensor(count.numpy() * 1.0)


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    window = [text(3, width=9 + 2 * i, seed=4 * step + i) for i in range(4)]
    for ids in window:
        ids[:, -2:] = 0
    targets = [torch.where(ids == 0, -100, ids)[:, 1:] for ids in window]
    count_of_all = number(sum((t != -100).sum() for t in targets))
    for ids, labels in zip(window, targets, strict=True):
        rows, width = labels.shape
        total = F.cross_entropy(
            model(ids[:, :-1]).view(rows * width, WORDS),
            labels.reshape(-1),
            ignore_index=-100,
            reduction="sum",
        )
        count = number((labels != -100).sum()) * len(window) if asked.of_each else count_of_all
        (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()
