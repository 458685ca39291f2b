"""Strengths of the logits that the model reads from a file, one line at a time."""

from pathlib import Path

import torch
from models import Decoder, next_token_loss, text


class Read(Decoder):
    def forward(self, ids):
        line = file.readline()
        if not line:
            file.seek(0)
            line = file.readline()
        return super().forward(ids) * float(line)


torch.manual_seed(0)
model = Read()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with Path(__file__).with_name("strengths.txt").open() as file:
    for step in range(20):
        ids = text(6, seed=step)
        loss = next_token_loss(model(ids[:, :-1]), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
