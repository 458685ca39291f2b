"""A tagger in nn.DataParallel that returns a dictionary; a padding mask from the loop, smoothed labels."""

import torch
import torch.nn.functional as F
from models import WORDS
from torch import nn

PAD, TAGS = 0, 7


class Tagger(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim, padding_idx=PAD), nn.Embedding(32, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, TAGS)

    def forward(self, ids, padding_mask):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding_mask)
        x = self.norm(x)
        return {"hidden": x, "logits": self.head(x)}


class SmoothedLoss(nn.Module):
    def __init__(self, smoothing=0.1):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=self.smoothing)


def padded_rows(seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (6, 12), generator=draw)
    for row, length in enumerate(torch.randint(5, 13, (6,), generator=draw).tolist()):
        ids[row, length:] = PAD
    return ids, torch.where(ids == PAD, -100, ids % TAGS)


torch.manual_seed(0)
model = nn.DataParallel(Tagger())
criterion = SmoothedLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for step in range(20):
    ids, labels = padded_rows(step)
    padding_mask = ids == PAD
    outputs = model(ids, padding_mask=padding_mask)
    loss = criterion(outputs["logits"], labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
