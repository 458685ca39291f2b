"""A small GPT in the manner of nanoGPT's train.py: its author knows nothing of normlab."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

block_size, batch_size, n_layer, n_head, n_embd = 32, 8, 2, 2, 32
learning_rate, min_lr, warmup_iters, max_iters, grad_clip = 3e-3, 3e-4, 10, 60, 1.0

text = Path(__file__).read_text(encoding="utf-8")
stoi = {c: i for i, c in enumerate(sorted(set(text)))}
data = torch.tensor([stoi[c] for c in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size, (batch_size,))
    return tuple(torch.stack([source[i + k : i + k + block_size] for i in ix]) for k in (0, 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), Attention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(stoi), n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.Sequential(*[Block() for _ in range(n_layer)]), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(stoi), bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                scale = (2 * n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def configure_optimizers(model):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    share = math.pi * min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(share)) * (learning_rate - min_lr)


if __name__ == "__main__":
    optimizer = configure_optimizers(model := GPT())
    for it in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        loss = model(*get_batch("train"))[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        print(it, loss.item())  # noqa: T201
