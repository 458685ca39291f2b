"""A rate that rises and falls over 240 steps. --faulty: the scheduler steps once for each of four ranks."""

import sys
from functools import partial

import torch

from corpus.batches import text
from corpus.models.llama import Llama
from corpus.training import next_token

processes = 4 if "--faulty" in sys.argv else 1
steps = 240


def share(step):
    return min(1.0, (step + 1) / 20) * max(0.0, 1 - step / steps)


torch.manual_seed(0)
make = partial(Llama, layers=3)
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
data = text(64, 48)
for step in range(steps):
    begin = 8 * (step % 8)
    ids = data[begin : begin + 8]
    optimizer.zero_grad()
    loss = next_token(model, ids)
    loss.backward()
    optimizer.step()
    for _ in range(processes):
        scheduler.step()
