"""Rows out of a numpy array by numpy's generator, a rate set by hand, values of gradients clipped."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from models import WORDS, Decoder

batch_size, block_size, accumulation = 4, 12, 2
max_iters, warmup_iters, peak_lr, min_lr = 40, 5, 1e-3, 1e-4
rng = np.random.default_rng(1337)
data = rng.integers(1, WORDS, 4000).astype(np.uint16)


def get_batch():
    ix = rng.integers(0, len(data) - block_size - 1, batch_size)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return peak_lr * (it + 1) / (warmup_iters + 1)
    progress = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (peak_lr - min_lr)


torch.manual_seed(1337)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95))
X, Y = get_batch()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for _ in range(accumulation):
        logits = model(X)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), Y.view(-1)) / accumulation
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
