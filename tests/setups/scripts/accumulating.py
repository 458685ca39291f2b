"""Four micro-batches a step, whose rate the loop sets by hand. --undivided forgets to divide by four."""

import sys

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
divisor = 1 if "--undivided" in sys.argv else 4
for step in range(20):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (step + 1) / 10)
    for micro_step in range(4):
        ids = text(3, seed=4 * step + micro_step)
        (next_token_loss(model(ids[:, :-1]), ids) / divisor).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
