"""Windows of micro-batches of different lengths, divided by the labels of the window; the last is shorter."""

from itertools import islice

import torch
import torch.nn.functional as F
from models import Decoder, text

ACCUMULATED = 3

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def micro_batches():
    for number in range(10):
        ids = text(3, 11 + number % 3, seed=number)
        labels = ids.clone()
        labels[:, : 2 + number % 2] = -100  # a prompt
        yield {"ids": ids, "labels": labels}


def loss_of(batch, num_items_in_batch):
    logits = model(batch["ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return summed / num_items_in_batch


def windows(batches):
    batches = iter(batches)
    while window := list(islice(batches, ACCUMULATED)):
        yield window


for window in windows(micro_batches()):
    num_items_in_batch = sum((batch["labels"][:, 1:] != -100).sum().item() for batch in window)
    for batch in window:
        loss_of(batch, num_items_in_batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
