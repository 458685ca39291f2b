"""A loop of a size and a seed, over words that repeat. --fail-at raises."""

import argparse

import torch
from models import Decoder, next_token_loss

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--rows", type=int, default=64)
asked = parser.parse_args()
torch.manual_seed(asked.seed)
rows = torch.arange(asked.rows)[:, None] + torch.arange(13)
loader = torch.utils.data.DataLoader(1 + rows % 39, batch_size=8, shuffle=True)
model = Decoder(asked.width, asked.depth)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
step = 0
while step < asked.steps:
    for ids in loader:
        loss = next_token_loss(model(ids[:, :-1]), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step == asked.fail_at:
            raise ValueError("no more text")
        if step == asked.steps:
            break
