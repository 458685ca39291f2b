"""A model that answers differently each time it is called, as one that counts its calls does."""

import torch
from models import Decoder, next_token_loss, text
from torch import nn


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder()

    def forward(self, ids):
        COUNT.append(1)
        return self.decoder(ids) * (1 + 0.01 * len(COUNT))


COUNT = []
torch.manual_seed(0)
model = Counting()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
