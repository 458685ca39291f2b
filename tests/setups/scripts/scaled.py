"""A GradScaler under autocast. --clip-scaled clips before the gradients are unscaled."""

import sys

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(20):
    ids = text(6, seed=step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = next_token_loss(model(ids[:, :-1]).float(), ids)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if "--clip-scaled" not in sys.argv:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
