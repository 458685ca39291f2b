"""A Lightning module: a decoder of one's own and two groups; the Trainer accumulates and clips."""

import lightning as L
import torch
from small import VOCABULARY, rows_of_tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.norm_ffn = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, normed, attn_mask=hidden, need_weights=False)[0]
        return x + self.ffn(self.norm_ffn(x))


class LanguageModel(L.LightningModule):
    def __init__(self, width=32, layers=2, length=16):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, ids, index):
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)


L.seed_everything(0)
loader = DataLoader(torch.tensor(rows_of_tokens(200, 12, 12)), batch_size=4, shuffle=True)
trainer = L.Trainer(
    accelerator="cpu",
    max_steps=20,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(LanguageModel(), loader)
