"""Two views of each row: an online network predicts what a moving average of itself makes of the other."""

import copy

import torch
import torch.nn.functional as F
from models import Encoder, text
from torch import nn


class Projector(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder, self.projection = Encoder(dim), nn.Linear(dim, dim)

    def forward(self, ids):
        return self.projection(self.encoder(ids).mean(1))


@torch.no_grad()
def follow(target, online, decay=0.99):
    for old, new in zip(target.parameters(), online.parameters(), strict=True):
        old.lerp_(new, 1 - decay)


def view(ids):
    dropped = torch.rand(ids.shape) < 0.15
    return torch.where(dropped, torch.zeros_like(ids), ids)


torch.manual_seed(0)
online = Projector()
predictor = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
target = copy.deepcopy(online)
for parameter in target.parameters():
    parameter.requires_grad = False
optimizer = torch.optim.AdamW([*online.parameters(), *predictor.parameters()], lr=1e-3)

for step in range(20):
    ids = text(8, 12, seed=step)
    first, second = view(ids), view(ids)
    with torch.no_grad():
        wanted = target(second)
    loss = 2 - 2 * F.cosine_similarity(predictor(online(first)), wanted, dim=-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow(target, online)
