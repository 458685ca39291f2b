"""Gradients are clipped by the script's own code, to the norm of the first argument."""

import sys

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
bound = float(sys.argv[1])
for step in range(20):
    for part in range(2):
        ids = text(3, seed=2 * step + part)
        (next_token_loss(model(ids[:, :-1]), ids) / (1 if "--undivided" in sys.argv else 2)).backward()
    norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
    for p in model.parameters():
        p.grad *= (bound / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    optimizer.zero_grad()
