"""Several texts in each row, each of which sees itself alone and counts its own places."""

import torch
import torch.nn.functional as F
from models import WORDS, heads, merged
from torch import nn

END = 1


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x, mask):
        q, k, v = (heads(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return x + self.mlp(x)


class PackedDecoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def forward(self, ids, position_ids, mask):
        x = self.words(ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def pack(rows, length, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, WORDS, (rows, length), generator=draw)
    ids[torch.rand(rows, length, generator=draw) < 0.2] = END
    return ids


torch.manual_seed(0)
model = PackedDecoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = pack(4, 20, step)
    ends = (ids == END).long()
    documents = ends.cumsum(1) - ends
    same = documents[:, :, None] == documents[:, None, :]
    mask = (same & torch.ones(20, 20, dtype=torch.bool).tril())[:, None]
    places = torch.arange(20).expand_as(ids)
    is_first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    position_ids = places - torch.where(is_first, places, 0).cummax(1).values
    logits = model(ids, position_ids, mask)
    labels = torch.where(documents[:, 1:] == documents[:, :-1], ids[:, 1:], -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
