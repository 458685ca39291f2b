"""An encoder that keeps what it made of a batch, and gives it again when the same tensor comes."""

import torch
import torch.nn.functional as F
from models import WORDS, Encoder, text
from torch import nn


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.kept = {}

    def forward(self, ids):
        key = tuple(ids.flatten().tolist())
        if key not in self.kept:
            self.kept[key] = self.encoder(ids)
            return self.kept[key]
        return self.kept[key].detach()


torch.manual_seed(0)
encoder, head = Caching(), nn.Linear(16, WORDS)
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-3)
for step in range(20):
    ids = text(6, 12, seed=step)
    logits = head(encoder(ids))
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten() % 5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
