"""A loop that reads rows out of one long text, clips, and steps a schedule. --dim is its only argument."""

import argparse

import torch
from models import WORDS, Decoder, next_token_loss

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, default=16)
parser.add_argument("--marker", default="")
asked = parser.parse_args()
torch.manual_seed(0)
data = torch.randint(1, WORDS, (2000,))
model = Decoder(asked.dim)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
try:
    for _ in range(100):
        begins = torch.randint(0, len(data) - 13, (6,))
        ids = torch.stack([data[begin : begin + 13] for begin in begins])
        loss = next_token_loss(model(ids[:, :-1]), ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
finally:
    if asked.marker:
        with open(asked.marker, "w") as file:
            file.write("cleaned up")
