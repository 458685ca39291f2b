"""A loop that draws from generators of its own, counts its calls in an object and normalises weights."""

import random

import numpy as np
import torch
from models import Decoder, text
from torch import nn


class Monitor:
    def __init__(self):
        self.calls, self.sizes = 0, []


class Noisy(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.decoder, self.monitor = Decoder(dim), Monitor()
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def forward(self, ids):
        self.monitor.calls += 1
        self.monitor.sizes.append(ids.numel())
        with torch.no_grad():
            weight = self.decoder.head.weight
            weight.copy_(nn.functional.normalize(weight, dim=-1))
        logits = self.decoder(ids)
        if not self.training:
            return logits
        noise = torch.rand(logits.shape, generator=self.torch) - 0.5
        return logits + 0.01 * noise + 0.01 * float(self.numpy.standard_normal()) + 0.01 * PYTHON.random()


PYTHON = random.Random(1)
torch.manual_seed(0)
model, words = Noisy(), torch.Generator().manual_seed(2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    losses = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    weights = 1 + 0.01 * torch.rand(losses.shape, generator=words)
    loss = (losses * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
