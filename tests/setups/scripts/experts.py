"""A mixture of experts, whose balancing loss has a backward pass of its own through the same graph."""

import torch
import torch.nn.functional as F
from models import WORDS, Block, next_token_loss, text
from torch import nn


class Experts(nn.Module):
    def __init__(self, dim, count=4):
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(count)
        )

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        top, chosen = shares.topk(2, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        gates = torch.zeros_like(shares).scatter(-1, chosen, top)
        out = sum(gates[..., n, None] * expert(x) for n, expert in enumerate(self.experts))
        used = F.one_hot(chosen, shares.shape[-1]).float().sum(-2).mean((0, 1))
        return out, len(self.experts) * (used * shares.mean((0, 1))).sum() / 2


class SparseDecoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.experts = nn.ModuleList(Experts(dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        balances = []
        for block, norm, experts in zip(self.blocks, self.norms, self.experts, strict=True):
            x = block(x)
            out, balance = experts(norm(x))
            x = x + out
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


torch.manual_seed(0)
model = SparseDecoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    logits, balance = model(ids[:, :-1])
    loss = next_token_loss(logits, ids)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    (0.01 * balance).backward()
    optimizer.step()
