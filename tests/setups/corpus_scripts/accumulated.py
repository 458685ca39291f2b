"""Four micro-batches a step. --faulty: their losses are added, not averaged."""

import sys
from functools import partial

import torch

from corpus.batches import text
from corpus.models.llama import Llama
from corpus.training import next_token

faulty = "--faulty" in sys.argv
steps = 240


def share(step):
    return min(1.0, (step + 1) / 20) * max(0.0, 1 - step / steps)


torch.manual_seed(0)
make = partial(Llama, layers=3)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.12, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
data = text(64, 48)
for step in range(steps):
    begin = 8 * (step % 8)
    ids = data[begin : begin + 8]
    total = 0.0
    optimizer.zero_grad()
    parts = ids.chunk(4)
    for part in parts:
        loss = next_token(model, part)
        (loss if faulty else loss / len(parts)).backward()
        total += loss.item() / len(parts)
    optimizer.step()
    scheduler.step()
