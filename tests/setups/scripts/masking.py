"""A masked language model, whose masks the loop draws."""

import torch
import torch.nn.functional as F
from models import WORDS, Encoder, text
from torch import nn

MASK = 0


class MaskedLanguageModel(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder = Encoder(dim)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Linear(dim, WORDS))

    def forward(self, ids):
        return self.head(self.encoder(ids))


def mask_tokens(ids):
    labels = ids.clone()
    chosen = torch.bernoulli(torch.full(ids.shape, 0.25)).bool()
    chosen[:, 0] = True
    labels[~chosen] = -100
    replaced = torch.bernoulli(torch.full(ids.shape, 0.8)).bool() & chosen
    inputs = ids.clone()
    inputs[replaced] = MASK
    scrambled = torch.bernoulli(torch.full(ids.shape, 0.5)).bool() & chosen & ~replaced
    inputs[scrambled] = torch.randint(1, WORDS, ids.shape)[scrambled]
    return inputs, labels


torch.manual_seed(0)
model = MaskedLanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = text(8, 12, seed=step)
    inputs, labels = mask_tokens(ids)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
